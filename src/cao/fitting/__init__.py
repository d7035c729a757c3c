"""Fits: parameters that make residuals small, within bounds, with their uncertainty."""
