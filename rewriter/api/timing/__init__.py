"""How fast models run: `bench`."""
