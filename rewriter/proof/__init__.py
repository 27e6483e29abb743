"""Proof that a rewritten model computes what the original computes: inputs, sessions, truth, comparison."""
