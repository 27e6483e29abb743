"""The Python API, and the composition of the engine with `passes`."""
