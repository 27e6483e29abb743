"""What a run found, as data, as JSON, in the terminal and as a page."""
