"""Proof that a rewritten model computes the same function as the original: inputs, sessions, truth, comparison."""
