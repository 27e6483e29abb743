"""The inputs of the proof: made for the model, or read from a file."""
