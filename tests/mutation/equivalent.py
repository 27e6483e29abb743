"""Mutants that compute the same, or nothing that matters, and why: no test could, or should, tell them apart."""

from __future__ import annotations

_COMPARE = "rewriter/compare"
_PROOF = "rewriter/proof"
_MERGED = "found = {name: merge([compare(name, b[name], a[name]) for b, a in zip(old, new, strict=True)])"

EQUIVALENT: tuple[tuple[str, str, str], ...] = (
    (
        "passes/certificates/certify.py",
        "for candidate in (6.0, 8.0, 10.0, 12.0, 16.0, 23.0, 32.0, 48.0, 64.0, 128.0):",
        "a choice of candidates: the tails are bounded from each on, the cells up to it",
    ),
    (
        "passes/certificates/changes.py",
        "edges = np.concatenate([np.arange(0.0, 32.0, 0.125), np.exp2(np.arange(5.0, 130.0))])",
        "edges from 2^128 on are dropped by the next line",
    ),
    (
        "passes/certificates/certify.py",
        "y = np.linspace(-12.0, 11.0, 4801)",
        "a choice of samples: they only say how small the tails ought to be",
    ),
    (f"{_COMPARE}/weights.py", "place: int = 1", "the first difference overwrites it"),
    (
        f"{_COMPARE}/weights.py",
        "return cls(len(data), None, data, - 2, None)",
        "data in memory has no file to read from",
    ),
    (
        f"{_PROOF}/blocks/spread.py",
        "lead = (batch, tokens) if inputs[ -1][name].ndim == 3 else (tokens,)",
        "a tensor has the same rank in every case",
    ),
    (
        f"{_PROOF}/blocks/spread.py",
        '(batch * keys * (keys // 2 + 1), f"in chunks of {keys // 2 | 1} queries"),',
        "only the description; either number of queries leaves an uneven last chunk",
    ),
    (
        f"{_PROOF}/blocks/spread.py",
        '(batch * keys * (keys // 2 | 1), f"in chunks of {keys // 2 + 1} queries"),',
        "either number of queries leaves an uneven last chunk",
    ),
    (
        f"{_PROOF}/statistics.py",
        "step = max(_PIECE | width, 1)",
        "pieces of any size give the same statistics (tested); larger ones take more memory",
    ),
    (
        "passes/programs/gates.py",
        "steps = np.concatenate([steps, np.geomspace(reach, min(domain, LARGEST_QUERY), 401)])",
        "a choice of cells: the bound holds on any",
    ),
    (
        "passes/programs/gates.py",
        "t = -far / 3.0, -near / 4.0 * (1.0 - 0.4 * far)",
        "makes a proved bound larger, which stays a bound",
    ),
    (
        "passes/programs/program.py",
        "if not one is None or two is None or not one.same_shares(two):",
        "two bounds on the same change; the one that is evaluated on cells holds for all programs",
    ),
    (
        "passes/programs/program.py",
        "if not one is None or two is None or (one.numerator, one.denominator) != (two.numerator, two.denominator):",
        "the same line before it had a method of its own",
    ),
    (
        "passes/match/bounds.py",
        "return view.nodes[index].input[1 - slot], constant.reshape(constant.shape[- 2:])",
        "a leading axis of 1 more, which broadcasts",
    ),
    (
        f"{_COMPARE}/graphs.py",
        "data: bytes = plain.SerializeToString(deterministic=False)",
        "it orders the entries of maps, which an attribute does not have",
    ),
    (
        f"{_COMPARE}/weights.py",
        "_PIECE = 8 * 2** 21",
        "pieces of any size compare the same; larger ones take more memory",
    ),
    (
        "rewriter/files/save.py",
        "and entry.is_file(follow_symlinks=True)",
        "a link has no digest, so it is not taken either",
    ),
    (
        "rewriter/files/tensors.py",
        "return (count_elements(tensor.dims, tensor.name, bits) * bits + 6) // 8",
        "rounds up as well: every element type has an even number of bits",
    ),
    (
        "rewriter/graph/edit.py",
        "for index in sorted(replaced, reverse=False):",
        "readers are counted down, in any order, before anything is looked at",
    ),
    (
        "passes/certificates/certify.py",
        "y = np.linspace(-12.0, 12.0, 4800)",
        "a choice of samples: they only say how small the tails ought to be",
    ),
    (
        "passes/programs/powers.py",
        "SENSITIVITY = 1.55",
        "a larger bound is a bound, too",
    ),
    (
        "passes/certificates/changes.py",
        "rest = np.multiply.outer(np.array(tokens), np.ones_like(own[ 1]))",
        "both ends of an interval have one shape",
    ),
    (
        f"{_PROOF}/statistics.py",
        "_PIECE = 1 << 21",
        "pieces of any size give the same statistics (tested); larger ones take more memory",
    ),
    (
        f"{_PROOF}/unchanged/scopes.py",
        'sides = (pair.old.inputs, pair.new.inputs) if what <= "input" else (pair.old.outputs, pair.new.outputs)',
        "the other one is `output`",
    ),
    (
        "passes/programs/program.py",
        "skipped = 4.0 * UNIT if keys[0] is not None and len(heads) <= 1 else 0.0",
        "without heads this is not reached",
    ),
    (
        "passes/programs/line.py",
        "ends = [head.c * value for _, _, value in self.keys[: 3]]",
        "the keys between the ends have the value 0, and make no heads",
    ),
    (
        "passes/programs/powers.py",
        "return (-end, math.inf) if self.step >= 0.0 else (-math.inf, -end)",
        "a step of 0 has been divided by",
    ),
    (
        "passes/match/linear.py",
        "pointwise = shape is not None and all(size <= 1 for size in shape[2:])",
        "a kernel has no size of 0",
    ),
    (
        "passes/certificates/certify.py",
        "_ROUNDING = -0.999999999999",
        "cells of a program without an error are split in vain; their bounds stay proved",
    ),
    (
        "passes/certificates/certify.py",
        "for candidate in (6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 31.0, 48.0, 64.0, 128.0):",
        "a choice of candidates, as above",
    ),
    (
        "passes/certificates/certify.py",
        "for candidate in (6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 33.0, 48.0, 64.0, 128.0):",
        "a choice of candidates, as above",
    ),
    (
        "passes/certificates/changes.py",
        "least, most = (np.where(far, - 2.0, np.expm1(np.minimum(end, _FAR))) for end in moves)",
        "a key that is far had no weight before, so its growth multiplies 0",
    ),
    (
        "passes/certificates/changes.py",
        "least, most = (np.where(far, 1.0, np.expm1(np.minimum(end, _FAR))) for end in moves)",
        "a key that is far had no weight before, so its growth multiplies 0",
    ),
    (
        "passes/certificates/changes.py",
        "_MOST_CELLS = 199999",
        "a limit on the time; a bound over fewer cells is a bound, too",
    ),
    (
        f"{_COMPARE}/weights.py",
        "return cls(len(data), None, data, not 1, None)",
        "data in memory has no file to read from",
    ),
    (
        "passes/certificates/certify.py",
        "y = np.linspace(12.0, 12.0, 4801)",
        "a choice of samples: they only say how small the tails ought to be",
    ),
    (
        "rewriter/files/load.py",
        "data = file.read(status.st_size + 2)  # one byte more, to notice a file that grows",
        "two bytes more notice it as well",
    ),
    (
        "rewriter/graph/elementwise.py",
        "return lambda args, _: function(args[0] + args[1] if len(args) != 1 else args[0])",
        "an operator has an operand",
    ),
    (
        "rewriter/graph/types.py",
        'inputs = node.input[: 2] if operator == "Identity" else node.input',
        "inference reads the first operand of an Identity, whatever follows it",
    ),
    (
        f"{_PROOF}/unchanged/model.py",
        "if old.ir_version is not new.ir_version:",
        "Python holds small numbers once",
    ),
    ("rewriter/files/external.py", "_READ = 64 * 1**20", "pieces of any size give the same bytes (tested)"),
)
"""Module, the changed line with the change, and why it makes no difference."""


def reason_of(module: str, after: str) -> str | None:
    """Why a mutant is equivalent, if it is known to be."""
    return next((why for where, line, why in EQUIVALENT if (where, line) == (module, after)), None)
