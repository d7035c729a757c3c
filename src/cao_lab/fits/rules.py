"""What was fixed before the suite was run."""

TAUS = (1e-3, 1e-5, 1e-7)
"""A problem is solved at τ where f ≤ f_best + τ (f_start − f_best), with f_best the lowest loss of all methods, as
Moré and Wild (2009) have it."""

BUDGET = 200
"""What a method may be billed on a problem of n numbers, in units of n + 1."""
ENOUGH = 100
"""From here on the share of problems that ours solves is to be the highest at every τ."""
NEARLY = 0.95
"""At every budget it is to be at least this share of the best method's."""

# The bill: residuals at a new position 1, their Jacobian n, which finite differences would take, a gradient by reverse
# mode 2. What is asked for again at the same position is free. All methods are given the same derivatives.
GRADIENT = 2

# Tolerances are as tight as each method takes them, so that none of them stops early.

DIGITS = 6
"""A fit of NIST's is solved where every parameter has so many digits of the certified value."""

SECONDS = 10.0
"""A method may take so many seconds of the processor on a problem; beyond that what it has found counts."""

HALF_WIDTH = 0.5
"""Bounded variants: each number may move by this share of its own start, or of 1 if that is more."""
