"""All mutants of a module as cosmic-ray makes them, but for those that mean nothing.

Left out: what is no part of a computation (annotations, type aliases, `__all__`, `if TYPE_CHECKING`), guards against
programmers that change no result (options of dataclasses, `strict=` of zip, a `*` before arguments by name), `@cache`,
`deterministic=` of protobuf (the order of maps, which no message of ONNX has), and widths in messages.
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import ndiff
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.work_item import MutationSpec

Place = tuple[int, int]

_GUARDS = {"strict", "deterministic"}
_WIDTHS = {"one_line", "quoted"}


@dataclass(frozen=True)
class Mutant:
    """A module with one change.

    Attributes:
        spec: the change, as cosmic-ray names it.
        code: the module with it.
        before: the changed line as it was; lines are joined where it is several.
        after: the line with the change.
    """

    spec: MutationSpec
    code: str
    before: str
    after: str


def mutants(root: Path, modules: Sequence[str], count: int, seed: int) -> Iterator[Mutant]:
    """A random sample: places drawn without replacement, and at each place one of its mutants."""
    places = [(module, place) for module in modules for place in sorted(_places(root, module))]
    chance = random.Random(seed)  # noqa: S311 - a sample, no secret
    chance.shuffle(places)
    for module, place in places:
        if count <= 0:
            return
        specs = _places(root, module)[place]
        made = (made_of(root, spec) for spec in chance.sample(specs, len(specs)))
        first = next((each for each in made if each is not None), None)
        if first is not None:
            count -= 1
            yield first


def diff_of(mutant: Mutant) -> list[str]:
    """The changed line before and after, as in the results file."""
    return [f"- {mutant.before}", f"+ {mutant.after}"]


def made_of(root: Path, spec: MutationSpec) -> Mutant | None:
    """The mutant that a specification names; None where the result is no Python, or the same."""
    source = (root / spec.module_path).read_text(encoding="utf-8")
    code = mutate_code(source, get_operator(spec.operator_name)(), spec.occurrence)
    try:
        if code is None or ast.dump(ast.parse(code)) == ast.dump(ast.parse(source)):
            return None
    except SyntaxError:
        return None
    lines = [line for line in ndiff(source.splitlines(), code.splitlines()) if line[0] in "-+"]
    before, after = (" ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return Mutant(spec, code, before, after)


_FOUND: dict[tuple[Path, str], dict[Place, list[MutationSpec]]] = {}


def _places(root: Path, module: str) -> dict[Place, list[MutationSpec]]:
    """The places of a module (line, column) that can be mutated, each with its mutants."""
    if (root, module) not in _FOUND:
        source = (root / module).read_text(encoding="utf-8")
        nodes, spans = list(ast_nodes(get_ast(source))), list(_meaningless(ast.parse(source)))
        found: dict[Place, list[MutationSpec]] = defaultdict(list)
        for name in operator_names():
            if get_operator(name).arguments():
                continue
            operator = get_operator(name)()
            positions = (each for node in nodes for each in operator.mutation_positions(node))
            for number, (start, end) in enumerate(positions):
                if not any(first <= start < last for first, last in spans):
                    found[start].append(MutationSpec(module, name, number, start, end))
        _FOUND[root, module] = dict(found)
    return _FOUND[root, module]


def _meaningless(tree: ast.AST) -> Iterator[tuple[Place, Place]]:
    """Start and end of whatever is not mutated."""
    for node in ast.walk(tree):
        skipped: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            yield from _star(node.args)
        if isinstance(node, ast.FunctionDef):
            skipped = [node.returns, *(each for each in node.decorator_list if ast.unparse(each) == "cache")]
        elif isinstance(node, ast.ClassDef):
            skipped = list(node.decorator_list)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            skipped = [node.annotation]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped = [node]
        elif isinstance(node, ast.Assign):
            alias = re.fullmatch(r"__all__|[A-Z][a-z]\w*", ast.unparse(node.targets[0]))
            skipped = [node] if alias else []
        elif isinstance(node, ast.Call):
            skipped = [each.value for each in node.keywords if each.arg in _GUARDS]
            skipped += node.args[1:] if ast.unparse(node.func) in _WIDTHS else []
        for each in skipped:
            if isinstance(each, ast.expr | ast.stmt) and each.end_lineno and each.end_col_offset is not None:
                # The @ of a decorator stands before it.
                yield (each.lineno, max(each.col_offset - 1, 0)), (each.end_lineno, each.end_col_offset)


def _star(arguments: ast.arguments) -> Iterator[tuple[Place, Place]]:
    """The `*` after which arguments are passed by name: from the last one by position to the first one by name."""
    if arguments.vararg or not arguments.kwonlyargs:
        return
    before: list[ast.arg | ast.expr] = [*arguments.posonlyargs, *arguments.args, *arguments.defaults]
    first = arguments.kwonlyargs[0]
    start = max((each.end_lineno or 0, each.end_col_offset or 0) for each in before) if before else None
    # Without others it stands at most one line above.
    yield start or (first.lineno - 1, 0), (first.lineno, first.col_offset)
