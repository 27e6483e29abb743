"""Fitting head programs to functions.

`runtime.fit_function` fits at run time and needs numpy only; `python -m benchmarks.fit` writes the entries of
`passes/programs/programs.json`. Both judge a program in `float32`, the arithmetic of the graph.
"""
