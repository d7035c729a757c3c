"""One file per optimizer: its settings, its step, and what it asks of a run. A new one is a new file.

The files are read by the command line, which does not wait for torch: they import it where an optimizer is built.
"""
