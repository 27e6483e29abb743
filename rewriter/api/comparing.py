"""`validate` and `diff`: whether two models compute the same function, and where they differ. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rewriter.api.pairing import Pair, Pairing
from rewriter.api.run import Run, name_of, silent
from rewriter.compare.graphs import difference, signature_differences
from rewriter.compare.tolerances import Rule, Tolerance
from rewriter.errors import ExitStatus, UsageError
from rewriter.files.load import Source, load_model
from rewriter.ort.providers import chosen_providers
from rewriter.proof.inputs.given import Inputs as GivenInputs
from rewriter.proof.inputs.given import as_given
from rewriter.proof.settings import Settings
from rewriter.proof.validate import Progress
from rewriter.report.comparison import Comparison

Tolerances = float | Mapping[str, float] | Mapping[str | None, float]
"""One number for all outputs, or output name to number; the key None stands for all outputs that are not named."""


def validate(
    original: Source,
    rewritten: Source,
    *,
    providers: str | Sequence[str] | None = None,
    inputs: GivenInputs | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    atol: Tolerances | None = None,
    rtol: Tolerances | None = None,
    top_k: int | None = None,
    taps: bool = False,
    bisect: bool = False,
    generate: int | None = None,
    allow_links: bool = False,
    progress: Progress = silent,
) -> Comparison:
    """Judge whether `rewritten` computes what `original` does: a certificate, and a run on a few inputs.

    Any two models with the same inputs and outputs can be compared. Heads that the plan in the metadata of `rewritten`
    names, but that are not certified, are tested block by block.

    Args:
        original: path of an ONNX file, or a model in memory.
        rewritten: path of the rewritten model, or a model in memory.
        providers: execution providers, `cpu` and `cuda`; default: cpu, and cuda where it works.
        inputs: inputs to use instead of generated ones: an npz file, arrays by name, or a list of those.
        dims: sizes for symbolic dimensions of the generated inputs.
        seed: random seed of the generated inputs.
        atol: absolute tolerance, for all outputs or by output name. Outputs with a tolerance are judged only by
            |rewritten - original| <= atol + rtol |original|.
        rtol: relative tolerance, likewise.
        top_k: also report how many of the k largest entries of each row both models share.
        taps: compare every block's output as well, and find the first whose error exceeds its share.
        bisect: if the models differ, test every part of `rewritten` alone and name the faulty ones.
        generate: number of tokens to generate greedily with both, through the key-value cache if there is one.
        allow_links: let external data be links inside one Hugging Face cache directory.
        progress: called with (current activity, steps done, total steps).

    Returns:
        The comparison; `verdict` says what is proved, and `exit_status` is 1 if the models differ, otherwise 0.

    Raises:
        UsageError: an option is invalid, or the given inputs left nothing to compare.
        ModelError: a model is unreadable, malformed or unsafe.
        ProviderError: a requested execution provider is not available.
        ValidationError: nothing could be compared, for example because a model does not run.
    """
    options = _Options(providers, inputs, dims, seed, atol, rtol, top_k, taps, bisect, generate, allow_links)
    return _compare(original, rewritten, options, progress, graph=False, outputs=True)


def diff(
    a: Source,
    b: Source,
    *,
    graph: bool = True,
    outputs: bool = True,
    providers: str | Sequence[str] | None = None,
    inputs: GivenInputs | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    atol: Tolerances | None = None,
    rtol: Tolerances | None = None,
    top_k: int | None = None,
    taps: bool = False,
    bisect: bool = False,
    generate: int | None = None,
    allow_links: bool = False,
    progress: Progress = silent,
) -> Comparison:
    """Compare two models: their files, and what they compute.

    Args:
        a: path of an ONNX file, or a model in memory.
        b: path of the second model, or a model in memory.
        graph: compare operators, nodes, metadata, and weights bit for bit.
        outputs: run both and compare the outputs as `validate` does.
        providers: as for `validate`.
        inputs: as for `validate`.
        dims: as for `validate`.
        seed: as for `validate`.
        atol: as for `validate`.
        rtol: as for `validate`.
        top_k: as for `validate`.
        taps: as for `validate`.
        bisect: as for `validate`.
        generate: as for `validate`.
        allow_links: as for `validate`.
        progress: as for `validate`.

    Returns:
        The comparison; `exit_status` is 0 if both compute the same or agree (without `outputs`: if graphs and weights
        are the same), else 1.

    Raises:
        UsageError: both `graph` and `outputs` are off, or as for `validate`.
        ModelError: as for `validate`.
        ProviderError: as for `validate`.
        ValidationError: as for `validate`.
    """
    if not graph and not outputs:
        raise UsageError("nothing to compare: leave the graph or the outputs in")
    if not outputs and (taps or bisect):
        raise UsageError("taps and bisect need the models to be run: leave the outputs in")
    if not outputs and generate:
        raise UsageError("generate needs the models to be run: leave the outputs in")
    options = _Options(providers, inputs, dims, seed, atol, rtol, top_k, taps, bisect, generate, allow_links)
    return _compare(a, b, options, progress, graph=graph, outputs=outputs)


@dataclass(frozen=True)
class _Options:
    """The options of `validate`, as given."""

    providers: str | Sequence[str] | None
    inputs: GivenInputs | None
    dims: Mapping[str, int] | None
    seed: int
    atol: Tolerances | None
    rtol: Tolerances | None
    top_k: int | None
    taps: bool
    bisect: bool
    generate: int | None
    allow_links: bool = False

    @property
    def _providers(self) -> tuple[str, ...]:
        return (self.providers,) if isinstance(self.providers, str) else tuple(self.providers or ())

    def pairing(self, progress: Progress) -> Pairing:
        """The options, checked."""
        if self.generate is not None and self.generate < 1:
            raise UsageError(f"generate is {self.generate}; it must be at least 1")
        settings = Settings(
            providers=chosen_providers(self._providers),
            inputs=as_given(self.inputs),
            dims=dict(self.dims or {}),
            seed=self.seed,
        )
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top-k is {self.top_k}; it must be at least 1")
        rule = Rule(_tolerances(self.atol, self.rtol), self.top_k)
        return Pairing(settings, rule, self.taps, self.bisect, self.generate, progress)


def _tolerances(atol: Tolerances | None, rtol: Tolerances | None) -> dict[str | None, Tolerance]:
    absolute, relative = (_by_name(given) for given in (atol, rtol))
    for value in (*absolute.values(), *relative.values()):
        if not 0.0 <= value < float("inf"):
            raise UsageError(f"a tolerance is {value:g}; it must be finite and at least 0")
    return {
        name: Tolerance(absolute.get(name, absolute.get(None, 0.0)), relative.get(name, relative.get(None, 0.0)))
        for name in {**absolute, **relative}
    }


def _by_name(given: Tolerances | None) -> dict[str | None, float]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given.items())
    return {None: float(given)}


def _compare(a: Source, b: Source, options: _Options, progress: Progress, *, graph: bool, outputs: bool) -> Comparison:
    run = Run(progress)
    with run.step("load", "loading"):
        models = load_model(a, allow_links=options.allow_links), load_model(b, allow_links=options.allow_links)
    pairing = options.pairing(progress)
    result = Comparison(name_of(a), name_of(b), signature=signature_differences(models[0].proto, models[1].proto))
    if graph:
        with run.step("graph", "comparing the graphs"):
            result = replace(result, graph=difference(*models))
    if result.signature:
        failures = tuple(f"the signatures differ: {text}" for text in result.signature)
        result = replace(result, failures=failures, verdict="different")
    elif outputs:
        _check_names(pairing.rule, [value.name for value in models[0].proto.graph.output])
        result = Pair(models, pairing, run).compare(result)
    elif result.graph is not None and result.graph.same:
        result = replace(result, verdict="same")
    else:
        result = replace(result, failures=("the graphs differ",), verdict="different")
    status = ExitStatus.VALIDATION_FAILED if result.verdict == "different" else ExitStatus.CONVERTED
    return replace(result, exit_status=status, seconds=run.seconds())


def _check_names(rule: Rule, known: Sequence[str]) -> None:
    for name in rule.tolerances:
        if name is not None and name not in known:
            raise UsageError(f"a tolerance names '{name}', which is not an output; the outputs are: {', '.join(known)}")
