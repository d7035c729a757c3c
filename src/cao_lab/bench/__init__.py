"""`cao bench`: what curvature costs in time and memory, as ratios, against the alternatives.

Nothing is imported here, because the processes in which memory is measured must start small; see `run`.
"""
