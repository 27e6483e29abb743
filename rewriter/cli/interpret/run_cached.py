"""`rewrite run MODEL`: run a model and record what its heads do; `rewriter.run_with_cache` does the work."""

from __future__ import annotations

from pathlib import Path

import click

from rewriter.cli.interpret.options import input_options
from rewriter.cli.options import MODEL, check_new, command, file_option
from rewriter.errors import UsageError
from rewriter.proof.inputs.given import Text


@command(
    {**MODEL, 5: "the execution provider is not available"},
    ok="the model was run",
    failed="onnxruntime does not run the model on these inputs",
    usage="the inputs do not fit the model",
)
@click.argument("model", type=click.Path(path_type=Path))
@input_options("The inputs; several cases as case/input.", providers={"help": "Execution provider; default: cpu."})
@file_option("--cache", metavar="FILE.npz", required=True, help="Write what was recorded, with the model's outputs.")
@click.option("--names", metavar="GLOB", multiple=True, default=("*",), help="Record only these hooks (repeatable).")
def run_cached(
    model: Path,
    *,
    inputs: Path | Text,
    cache: Path,
    names: tuple[str, ...],
    providers: tuple[str, ...],
) -> int:
    """Run MODEL on given inputs, and record the residual stream and what original and neuron heads compute.

    Names are those of TransformerLens' hooks, such as blocks.0.attn.hook_pattern. --text may be repeated: each text is
    a case.
    """
    if cache.suffix != ".npz":
        raise UsageError(f"'{cache}' must end in .npz")
    check_new(cache)
    if len(providers) > 1:
        raise UsageError("one execution provider at a time")
    from rewriter.api.interpret.arrays import write_npz
    from rewriter.api.interpret.cache import Recording
    from rewriter.api.interpret.index import heads
    from rewriter.files.atomic import atomically
    from rewriter.files.save import check_output

    index = heads(model)
    recording = Recording.of(index, inputs, names, providers[0] if providers else "cpu")
    check_output(cache, source=index.source, force=False)
    shapes: dict[str, tuple[int, ...]] = {}
    spelled = () if recording.tokens is None else recording.tokens.spelled
    facts = index.to_json() | ({"tokens": spelled} if spelled else {})
    atomically(cache, lambda file: write_npz(file, recording.noted(shapes), facts))
    for tokens in spelled:
        click.echo(f"tokens: {' | '.join(tokens)}")
    for name, shape in shapes.items():
        click.echo(f"{name:<44} {list(shape)}")
    click.echo(f"{len(shapes)} arrays written to {cache}")
    return 0
