"""Matching: from a graph to MLP blocks."""
