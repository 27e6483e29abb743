"""Operators in numpy, for the float64 evaluation."""
