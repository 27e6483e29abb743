"""The bias token carried through the whole network (Theorem 6), as a change of a graph that is attention-only already."""
