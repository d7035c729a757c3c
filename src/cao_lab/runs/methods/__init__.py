"""The optimizers to compare with: their settings, their steps, and what they ask of a run.

One more is a class like its neighbours in first_order.py, or a file of its own, where it is found. The files are read
by the command line, which does not wait for torch: they import it where an optimizer is built.
"""
