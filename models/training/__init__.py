"""Small decoders that are trained here, in minutes, on data that needs no download (`python -m models train`)."""
