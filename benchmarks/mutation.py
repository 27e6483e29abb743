"""Does a test notice when the checker is changed? `python -m benchmarks.mutation [--sample N] [--file NAME] [-o FILE]`.

Every mutant of `rewriter/proof/certificate` changes one thing: a comparison, an operator of arithmetic or logic, a
number, a condition, a statement that is left out, a value that is not returned. The tests that enter its function run
in a forked process until one fails, the fastest first; a mutant that all of them pass survives. Survivors are judged by
hand: many compute the same, or only take longer. Results are appended, so that a run can be resumed.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import io
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).resolve().parents[1]
ROOM = ROOT / "rewriter" / "proof" / "certificate"
TESTS = "tests/rewriter/proof/certificate"
_OTHER = {
    ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"), ast.Eq: ("!=",),
    ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",), ast.In: ("not in",), ast.NotIn: ("in",),
    ast.Add: ("-",), ast.Sub: ("+",), ast.Mult: ("/",), ast.Div: ("*",), ast.FloorDiv: ("*",), ast.Mod: ("*",),
    ast.Pow: ("*",), ast.BitOr: ("&",), ast.BitAnd: ("|",), ast.And: ("or",), ast.Or: ("and",),
}  # fmt: skip
"""What may stand in place of an operator."""


class Mutant(NamedTuple):
    """One change: the text between two offsets of a file becomes another.

    `function` are the lines of the function around it, its decorators included, from 0 where there is none.
    """

    file: str
    function: tuple[int, int]
    line: int
    start: int
    end: int
    text: str

    @property
    def key(self) -> str:
        """Names the change as long as the lines stay where they are."""
        return f"{self.file}:{self.line}:{self.start}: {self.text}"


def mutants(path: Path) -> Iterator[Mutant]:  # noqa: C901 - one case for each kind of node
    """Every mutant of a file, in order."""
    source = path.read_text(encoding="utf-8")
    starts = [0]
    for each in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(each))

    def span(rows: Any) -> tuple[int, int]:
        return starts[rows.lineno - 1] + rows.col_offset, starts[rows.end_lineno - 1] + rows.end_col_offset

    def made(node: Any, start: int, end: int, text: str) -> Mutant:
        around = [each for each in functions if each[0] <= node.lineno <= each[1]]
        return Mutant(path.name, max(around, default=(0, 0)), node.lineno, start, end, text)

    def text_of(node: ast.AST) -> str:
        return source[slice(*span(node))]

    def between(node: Any, one: ast.AST, two: ast.AST, kind: ast.AST) -> Iterator[Mutant]:
        """The operator between two operands, whatever parentheses stand around it."""
        start, end = span(one)[1], span(two)[0]
        word = source[start:end].strip(" ()\n")
        at = source.find(word, start, end)
        for other in _OTHER.get(type(kind), ()):
            yield made(node, at, at + len(word), other)

    tree = ast.parse(source)
    functions = [
        (min([each.lineno, *(one.lineno for one in each.decorator_list)]), each.end_lineno or 0)
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef)
    ]
    for node in _code(tree):
        if isinstance(node, ast.Compare):
            for one, kind, two in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from between(node, one, two, kind)
        elif isinstance(node, ast.BinOp):
            yield from between(node, node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            for one, two in zip(node.values, node.values[1:], strict=False):
                yield from between(node, one, two, node.op)
        elif isinstance(node, ast.UnaryOp):
            yield made(node, *span(node), f"({text_of(node.operand)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            other = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield made(node, *span(node), other)
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield made(node, *span(node.test), f"(not ({text_of(node.test)}))")
        elif isinstance(node, ast.Return) and node.value is not None and text_of(node.value) not in ("None", "False"):
            yield made(node, *span(node.value), "None")
        elif isinstance(node, (ast.AugAssign, ast.Raise, ast.Break, ast.Continue, ast.Delete)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield, ast.YieldFrom))
        ):
            yield made(node, *span(node), "pass")


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, no texts of messages, no limits of effort."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.JoinedStr, ast.arguments, ast.ImportFrom)):
            continue
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield node.value
                yield from _code(node.value)
            continue
        if isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id.lstrip("_").startswith("MOST")
            for target in node.targets
            for each in ast.walk(target)
        ):
            continue
        yield node
        yield from _code(node)


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from another source."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source
        self.name = ".".join(path.relative_to(ROOT).with_suffix("").parts)

    def find_spec(self, fullname: str, *_: Any) -> Any:
        if fullname == self.name:
            return importlib.util.spec_from_loader(fullname, self, origin=str(self.path))
        return None

    def exec_module(self, module: Any) -> None:
        module.__file__ = str(self.path)
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)  # noqa: S102 - our own source


class _Trace:
    """A plugin of pytest: which functions of the room each test enters, and how long it takes."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = defaultdict(list)
        self.seconds: dict[str, float] = {}
        self._seen: set[CodeType] = set()
        self._start = 0.0

    def _event(self, frame: FrameType, _event: str, _: object) -> None:
        self._seen.add(frame.f_code)

    def pytest_runtest_logstart(self) -> None:
        """Of pytest."""
        self._seen, self._start = set(), time.perf_counter()
        sys.settrace(self._event)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Of pytest."""
        sys.settrace(None)
        self.seconds[nodeid] = time.perf_counter() - self._start
        for code in self._seen:
            if code.co_filename.startswith(str(ROOM)):
                self.tests[f"{Path(code.co_filename).name}:{code.co_firstlineno}"].append(nodeid)


def _quietly(arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
    import pytest

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return int(
            pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins=list(plugins))
        )


def traced(cache: Path) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Tests by the first line of the functions that they enter, and their seconds; measured once, in a fork."""
    if not cache.exists():
        if not (child := os.fork()):
            trace = _Trace()
            code = _quietly([TESTS], [trace])
            cache.write_text(json.dumps([trace.tests, trace.seconds]))
            os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise click.ClickException(f"the tests of {TESTS} do not pass without a mutant")
    tests, seconds = json.loads(cache.read_text())
    return tests, seconds


def survives(mutant: Mutant, tests: Sequence[str], seconds: float) -> bool:
    """Whether all tests pass with a mutant; one that takes ten times as long does not."""
    path = ROOM / mutant.file
    source = path.read_text(encoding="utf-8")
    changed = source[: mutant.start] + mutant.text + source[mutant.end :]
    try:
        compile(changed, mutant.file, "exec")
    except SyntaxError:
        return False
    child = os.fork()
    if not child:
        signal.alarm(int(10 * seconds) + 20)
        sys.meta_path.insert(0, _Mutated(path, changed))
        try:
            code = _quietly(tests)
        except BaseException:  # noqa: BLE001 - whatever it is, it was noticed
            code = 1
        os._exit(min(code, 255))
    return os.waitpid(child, 0)[1] == 0


@click.command()
@click.option("--sample", type=int, help="As many mutants, drawn at random; without it, all.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--file", "files", multiple=True, help="Only of this file of the room; may be given several times.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=ROOT / "benchmarks/results/mutation.jsonl",
    show_default=True,
)
@click.option("--most", type=float, default=60.0, show_default=True, help="Seconds of tests for one mutant.")
def main(sample: int | None, seed: int, files: tuple[str, ...], output: Path, most: float) -> None:
    """Run the mutants that are not in the output yet."""
    import flint  # noqa: F401 - imported once, before processes are forked
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401

    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    entering, seconds = traced(output.with_suffix(".trace"))
    paths = [path for path in sorted(ROOM.glob("*.py")) if not files or path.name in files]
    found = [each for path in paths for each in mutants(path)]
    chosen = found if sample is None else Random(seed).sample(found, min(sample, len(found)))  # noqa: S311
    done = {json.loads(line)["mutant"] for line in output.read_text().splitlines()} if output.exists() else set()
    plain = found[0]._replace(start=0, end=0, text="")
    if not survives(plain, [min(seconds, key=seconds.__getitem__)], 1.0):
        raise click.ClickException("a test fails in a forked process even without a mutant")
    with output.open("a") as file:
        for mutant in chosen:
            if mutant.key in done:
                continue
            tests: list[str] = []
            budget = most
            first, last = mutant.function
            within = (entering.get(f"{mutant.file}:{line}", ()) for line in range(first, last + 1))  # and its lambdas
            own = {test for each in within for test in each} if first else set(seconds)
            for test in sorted(own, key=lambda each: (seconds[each], each)):
                budget -= seconds[test]
                if budget < 0 and tests:
                    break
                tests.append(test)
            start = time.perf_counter()
            alive = not tests or survives(mutant, tests, sum(seconds[each] for each in tests))
            row = {
                "mutant": mutant.key,
                "survives": alive,
                "tests": len(tests),
                "seconds": round(time.perf_counter() - start, 1),
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
            if alive:
                click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
