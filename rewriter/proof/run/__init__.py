"""Run models: as a whole, in segments."""
