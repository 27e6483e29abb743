"""Changes that other tools make to a model file, one file per kind of tool; the table is `models.variants`."""
