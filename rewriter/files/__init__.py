"""Model files: loading without trust, and writing without ever leaving a broken output.

`load` reads a model and checks it, `structure` says what a sound model is, `external` guards the data files
beside it, `save` stages and commits the output. Everything here assumes a POSIX file system.
"""
