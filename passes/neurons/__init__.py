"""Neurons that are proved not to be needed, and blocks without them."""
