"""Removing neurons that are proved not to be needed."""
