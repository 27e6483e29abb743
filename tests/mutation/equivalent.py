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
        f"{_PROOF}/blocks/block.py",
        "allowed=max(part.allowed or -1.0 for part in parts),",
        "0 only for an output that is 0 throughout; printed, and compared with nothing",
    ),
    (
        f"{_PROOF}/end_to_end.py",
        "scale, error, own = (float(np.max(each, initial= -1.0)) for each in (channels.scale, new_errors, old_errors))",
        "differs only for an output without channels, which fails as never compared",
    ),
    (
        f"{_PROOF}/blocks/adversarial_points.py",
        "specials = [0.0, -0.0, tiny, -tiny, float(limits.tiny), -float(limits.tiny), 1e4, - 10001.0]",
        "-1e4 is among the tails too",
    ),
    (
        f"{_PROOF}/reference/audit.py",
        "a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b < b)))) for a, b in pairs",
        "a short cut: NaN on both sides is found equal by what follows",
    ),
    (
        f"{_PROOF}/reference/audit.py",
        "same = (wide == rounded) ^ (np.isnan(wide) & np.isnan(truth)) | (overflows & ~np.isfinite(wide))",
        "what is equal is not NaN: never both",
    ),
    (
        f"{_PROOF}/blocks/spread.py",
        "lead = (batch, tokens) if inputs[ -1][name].ndim == 3 else (tokens,)",
        "a tensor has the same rank in every case",
    ),
    (
        f"{_PROOF}/blocks/sublayer.py",
        "_SCALES = (1.0, 0.0, 1e-6, 1e-2, 7.0, 1e3)",
        "a choice of samples: 7 serves as well as 8",
    ),
    (
        f"{_PROOF}/blocks/activation.py",
        "nans, infinities = one_token(1.0, np.nan, - 0.0), one_token(-np.inf, np.inf)",
        "a choice of samples: any number beside NaN serves",
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
        f"{_PROOF}/blocks/adversarial_points.py",
        "order = np.random.default_rng( 1).permutation(rows * channels)",
        "any order serves",
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
        "rewriter/files/datafiles.py",
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
        f"{_PROOF}/blocks/sublayer.py",
        "names = tuple(inputs[ -1]) if inputs else claim.block_inputs",
        "every case has the same names",
    ),
    (
        "passes/certificates/certify.py",
        "y = np.linspace(-12.0, 12.0, 4800)",
        "a choice of samples: they only say how small the tails ought to be",
    ),
    (
        f"{_PROOF}/pass_rule.py",
        "middle = used[(used.size - 1) // 2] if used.size else -1.0",
        "scales are at least 0 already",
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
        f"{_PROOF}/end_to_end.py",
        f"{_MERGED} for name in old[ -1]}}",
        "every case has the same outputs",
    ),
    (f"{_PROOF}/end_to_end.py", "for name in before[ -1]:", "every case has the same outputs"),
    (
        f"{_PROOF}/end_to_end.py",
        "optimised = before.ways[ways[+1]], after.ways[ways[-1]]",
        "there are two ways",
    ),
    (
        f"{_PROOF}/end_to_end.py",
        "optimised = before.ways[ways[-1]], after.ways[ways[1]]",
        "there are two ways",
    ),
    (
        f"{_PROOF}/statistics.py",
        "_PIECE = 1 << 21",
        "pieces of any size give the same statistics (tested); larger ones take more memory",
    ),
    (
        f"{_PROOF}/pass_rule.py",
        "return np.where(np.isfinite(wide), wide, -1.0)",
        "a scale is the largest of these, and at least 0",
    ),
    (
        f"{_PROOF}/planned.py",
        "proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 2))",
        "a private domain, which has one version",
    ),
    (
        f"{_PROOF}/unchanged/scopes.py",
        'sides = (pair.old.inputs, pair.new.inputs) if what <= "input" else (pair.old.outputs, pair.new.outputs)',
        "the other one is `output`",
    ),
    (
        f"{_PROOF}/blocks/activation.py",
        "nans, infinities = one_token( 2.0, np.nan, -1.0), one_token(-np.inf, np.inf)",
        "any number beside the NaN serves",
    ),
    (
        f"{_PROOF}/blocks/activation.py",
        "values = np.random.default_rng( 1).normal(0.0, 2.0, points.size)",
        "a choice of samples",
    ),
    (
        f"{_PROOF}/blocks/sublayer.py",
        "values = np.random.default_rng(0).normal(0.0, 2.0, like.shape)",
        "any noise serves",
    ),
    (
        f"{_PROOF}/blocks/sublayer.py",
        "worst, failures, cases = -1.0, [], []",
        "there is a case, and its error is at least 0",
    ),
    (
        f"{_PROOF}/blocks/sublayer.py",
        "_SCALES = (1.0, 0.0, 1e-6, -0.99, 8.0, 1e3)",
        "a choice of samples",
    ),
    (
        f"{_PROOF}/blocks/block.py",
        "old = _runs(item.before, item.ways[ -1], cases, item.claim.block_outputs)",
        "the original's rounding in any way of running it",
    ),
    (
        f"{_PROOF}/reference/engine.py",
        "if len(found) is not len(node.gives) or any(value is None for value in found.values()):",
        "there are never more outputs than names",
    ),
    (
        f"{_PROOF}/reference/engine.py",
        "gives = [name for node in nodes for name in node.gives if readers.get(name, +1) >= end or ways.keep(node)]",
        "a step of one operator, at the start, gives what nobody reads; that is dropped after it",
    ),
    (
        f"{_PROOF}/reference/audit.py",
        "plain, wide = (read_model(model, base_dir, wide=wide, held=True) for wide in (False, True))",
        "weights are held in memory, which takes more of it",
    ),
    (f"{_PROOF}/reference/tolerance.py", "spread = [ -1.0] * len(here)", "gaps are at least 0"),
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
        "rewriter/files/modelfile.py",
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
        f"{_PROOF}/blocks/block.py",
        "new_error = float(np.max(channels.errors(new, truth, old), initial= -1.0))",
        "differs only for an output without channels, which fails as never compared",
    ),
    (
        f"{_PROOF}/unchanged/model.py",
        "if old.ir_version is not new.ir_version:",
        "Python holds small numbers once",
    ),
    ("rewriter/files/external.py", "_READ = 64 * 1**20", "pieces of any size give the same bytes (tested)"),
    (
        "rewriter/files/soundness/operators.py",
        "return _Arity(least, 2** 32 if most is None else most, named)",
        "no node has that many inputs",
    ),
)
"""Module, the changed line with the change, and why it makes no difference."""


def reason_of(module: str, after: str) -> str | None:
    """Why a mutant is equivalent, if it is known to be."""
    return next((why for where, line, why in EQUIVALENT if (where, line) == (module, after)), None)
