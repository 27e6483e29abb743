"""Model files: load them without trusting them, and write them without ever leaving a broken output.

`load` reads and checks a model, `soundness` defines what a sound model is, `external` guards the data files beside it,
`save` stages and commits the output. All of this assumes a POSIX file system.
"""
