"""The Python API, and the composition of the engine with the pass.

Apart from the command line, these are the only modules of `rewriter` that import `passes`.
"""

from rewriter.api.benching import bench
from rewriter.api.comparing import diff, validate
from rewriter.api.inspection import Inspection, inspect
from rewriter.api.rewriting import rewrite

__all__ = ["Inspection", "bench", "diff", "inspect", "rewrite", "validate"]
