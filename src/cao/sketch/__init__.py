"""What both optimizers keep of the curvature, how it is made, and what they do with it."""
