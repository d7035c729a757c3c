"""`cao spectrum`: the curvature of a trained model, or of a user's own."""
