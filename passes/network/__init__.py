"""The bias token carried through the whole network (Theorem 6)."""
