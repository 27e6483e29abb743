"""The Python API, and the composition of the engine with the pass: one file per verb.

Apart from the command line and `rewriter.interpret`, these are the only modules of `rewriter` that import `passes`.
`rewriter` itself says where each verb is, and imports it when it is used: a rewriting does not need what compares
models.
"""
