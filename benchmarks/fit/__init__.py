"""The offline search for the head programs of `passes/programs/programs.json`."""
