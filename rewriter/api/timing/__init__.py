"""How fast models and heads run: `bench`, and the measurement behind `--tune`."""
