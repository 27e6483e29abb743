"""What other tools do to a model file, one file per kind of tool; the table is `models.variants`."""
