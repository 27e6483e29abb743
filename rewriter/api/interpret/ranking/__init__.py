"""Heads compared with each other and with the vocabulary: composition, tokens, activity, copies."""
