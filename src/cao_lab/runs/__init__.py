"""One training run, from its first step to its log on disk."""
