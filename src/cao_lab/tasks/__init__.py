"""What is learned: data sets and models."""
