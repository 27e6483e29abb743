"""Commands for results that were saved: nothing is run."""
