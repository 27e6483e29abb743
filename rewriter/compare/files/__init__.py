"""Compare two models as files: operators, nodes, weights, metadata. Nothing is run here."""
