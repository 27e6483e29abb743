"""Proof that nothing outside the replaced regions changed."""
