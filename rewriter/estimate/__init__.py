"""Time and memory of a run, estimated from counts before it starts."""
