"""One function per claim of the paper: what the runs of a setting say about it. A judge's docstring is its rule."""
