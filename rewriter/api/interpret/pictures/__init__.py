"""What the page of heads shows: chosen heads on one sequence, and the attribution graph of a logit."""
