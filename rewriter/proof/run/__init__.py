"""Running models: whole, in segments, in several processes."""
