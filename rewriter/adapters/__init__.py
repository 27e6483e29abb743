"""Adapters for other tools; each module needs the package of its tool, and no other module imports it."""
