"""Compare the ratios of two runs: has a rewritten model become slower, against its original?

Absolute times depend on the machine, ratios much less.
"""

from collections.abc import Iterator, Sequence

from benchmarks.performance.measure import KEY, Row

LOSS = 1.3
"""A ratio this many times the committed one is a loss."""


def losses(committed: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    """What became slower, in words."""
    before = {tuple(row[name] for name in KEY): row for row in committed}
    for row in found:
        key = tuple(row[name] for name in KEY)
        if key not in before:
            continue
        old, new = before[key]["rewritten"]["paired"], row["rewritten"]["paired"]
        # The control is the same model twice: where it is off, so are all ratios of its row.
        noise = max(1.0, row["control"]["paired"])
        if new > LOSS * old * noise:
            name = f"{row['model']} {row['type']}, {row['tokens']} tokens, {row['layers']} layers"
            yield f"{name}: {new:.2f} times the original, committed is {old:.2f} (control {noise:.2f})"


def compared(committed: Sequence[Row], found: Sequence[Row]) -> int:
    """How many rows both runs have."""
    before = {tuple(row[name] for name in KEY) for row in committed}
    return sum(tuple(row[name] for name in KEY) in before for row in found)
