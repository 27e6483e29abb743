"""What went wrong where: why an original is far from float64, and which block of a rewritten model is to blame."""
