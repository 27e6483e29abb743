"""One table of operators, and an evaluator of it in several arithmetics: residues modulo a prime, float64."""
