"""A certificate that one model computes what another does, at every input of every size."""
