"""Interpretation: the heads of a model, what they compute, and what a logit is made of; the core never imports it."""
