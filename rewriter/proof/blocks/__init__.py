"""The proof of one block: its activation, the sublayer in its place, the inputs that it is tried on."""
