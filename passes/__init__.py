"""The domain: MLP blocks, linear operators, activations, head programs, and the forms that they take in a graph."""
