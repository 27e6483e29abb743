"""One table of operators, evaluated in several arithmetics: residues modulo a prime, float64, where entries come from."""
