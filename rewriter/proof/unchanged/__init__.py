"""The proof that nothing else changed: everything outside the replaced regions is the original's."""
