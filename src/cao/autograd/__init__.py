"""What torch's autograd is asked for, and how a model is run again without a trace."""
