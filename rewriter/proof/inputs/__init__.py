"""The inputs of the proof: generated for the model, or read from a file."""
