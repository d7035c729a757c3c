"""What the optimizer decides by itself, each rule a value: how much damping, how many directions, when to refresh."""
