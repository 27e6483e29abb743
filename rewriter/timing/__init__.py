"""How fast models run: one process per model, taking turns."""
