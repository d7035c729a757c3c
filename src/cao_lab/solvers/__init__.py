"""Full-batch solvers side by side: one budget, one bill, one kind of record."""
