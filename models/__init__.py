"""Example models: a table of architectures and an exporter driven by it.

Run from the checkout as `python -m models`; not part of the installed package.
"""
