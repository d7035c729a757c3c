"""Operators on parameters: the Hessian, the Gauss-Newton matrix, least squares, and their algebra."""
