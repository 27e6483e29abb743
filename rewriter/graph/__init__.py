"""Graph helpers: a frozen index of a graph, its types and constants, and the surgery on it. Knows no MLPs."""
