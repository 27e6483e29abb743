"""Graph helpers: a frozen index of a graph, its types and constants, and graph surgery. Nothing here is about MLPs."""
