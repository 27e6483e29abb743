"""Comparison of any two models: their outputs, what happens inside, and their files."""
