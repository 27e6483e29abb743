"""The results of a run as data, as JSON, in the terminal and as a page."""
