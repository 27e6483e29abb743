"""How long a run takes and how much memory it needs, measured; and the factors of the estimate, fitted to that."""
