"""Fitting: from a function to a head program.

`runtime.fit_function` fits on the spot, with numpy alone; `python -m passes.fit` makes the entries of
`passes/programs.json`. Both judge a program by `float32`, the arithmetic of the graph.
"""
