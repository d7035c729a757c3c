"""What curvature is taken to cost, in gradients: measured, and kept as constants, since a clock would change runs."""

HESSIAN_PRODUCT = 4.0
"""A product with a Hessian; 2 to 5 were measured (docs/performance.md)."""
LEAST_SQUARES_PRODUCT = 1.25
"""A product with JᵀJ of residuals, on networks of 900 to 20,000 parameters."""
JACOBIAN = 10.0
"""A Jacobian of residuals in memory, for each residual of a point."""
