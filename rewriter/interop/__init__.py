"""Bridges to the tools that interpretability researchers already use; each needs an extra of its own."""
