"""What rounding adds to a head program, measured at every number that a pre-activation can be."""
