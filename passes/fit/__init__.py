"""Fitting: from a function to a head program.

`runtime.fit_function` fits on the spot, with numpy alone; `python -m benchmarks.fit` makes the entries of
`passes/programs/programs.json`. Both judge a program by `float32`, the arithmetic of the graph.
"""
