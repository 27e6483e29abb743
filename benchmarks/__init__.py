"""Benchmarks: latency and memory of rewritten models, cost of planning, accuracy of programs and forms.

Run from the checkout as `python -m benchmarks.latency` and so on; not part of the installed package.
"""
