"""Head programs: an activation as a sum of attention heads, with a proved error."""
