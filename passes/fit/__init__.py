"""Fitting head programs to functions at run time; `python -m benchmarks.fit` fits those of the table."""
