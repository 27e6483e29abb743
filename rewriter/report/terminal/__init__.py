"""Reports and comparisons in the terminal."""
