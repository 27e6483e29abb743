"""Run models: as a whole, in segments, in several processes."""
