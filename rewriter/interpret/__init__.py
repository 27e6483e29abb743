"""Interpretation: the heads of a model, their values, and the parts of a logit; the core never imports it."""
