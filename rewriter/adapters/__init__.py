"""For other people's tools; each file needs the package of its tool, and nothing imports it."""
