"""Interpretation: the heads of a model, what they compute, and the parts of a logit; the core never imports it."""
