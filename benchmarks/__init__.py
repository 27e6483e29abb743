"""Benchmarks: latency of rewritten models, memory with large weights, cost of planning.

Run from the checkout as `python -m benchmarks.latency` and so on; not part of the installed package.
"""
