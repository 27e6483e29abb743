"""Does a test notice when the checker is changed? `python -m tools.mutation [--sample N] [--file NAME] [-o FILE]`.

Every mutant of the evaluator and of the certificate changes one thing: a comparison, an operator of arithmetic or
logic, a number, a condition, a statement that is left out, a value that is not returned. The tests that enter its
function run in a forked process until one fails, the fastest first; a mutant that all of them pass survives. The
process has the tests collected already, and the function gets other code; only where that would not be the same, as the
function ran while tests were collected, all is imported anew. Survivors are judged by hand, and get a `reason`: many
compute the same, or only take longer. Results are appended, so that a run can be resumed.
"""

import ast
import gc
import importlib.abc
import importlib.util
import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).resolve().parents[1]
CHECKER = "rewriter/evaluate", "rewriter/proof/values", "rewriter/proof/certificate"
TESTS = "tests/rewriter/evaluate", "tests/rewriter/proof"
_OTHER = {
    ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"), ast.Eq: ("!=",),
    ast.NotEq: ("==",), ast.Is: ("is not",), ast.IsNot: ("is",), ast.In: ("not in",), ast.NotIn: ("in",),
    ast.Add: ("-",), ast.Sub: ("+",), ast.Mult: ("/",), ast.Div: ("*",), ast.FloorDiv: ("*",), ast.Mod: ("*",),
    ast.Pow: ("*",), ast.BitOr: ("&",), ast.BitAnd: ("|",), ast.And: ("or",), ast.Or: ("and",),
}  # fmt: skip
"""What may replace an operator."""


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
        return Mutant(str(path.relative_to(ROOT)), max(around, default=(0, 0)), node.lineno, start, end, text)

    def text_of(node: ast.AST) -> str:
        return source[slice(*span(node))]

    def between(node: Any, one: ast.AST, two: ast.AST, kind: ast.AST) -> Iterator[Mutant]:
        """The operator between two operands, with any parentheses around it."""
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
        if node is getattr(tree, "returns", None):
            continue
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
    """Which functions of the folder each test enters, by their files and first lines, and how long it takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.entering: dict[str, list[str]] = defaultdict(list)

    def run(self, name: str, work: Callable[[], object]) -> None:
        seen = set[CodeType]()

        def event(frame: FrameType, _event: str, _: object) -> None:
            seen.add(frame.f_code)

        start = time.perf_counter()
        sys.settrace(event)
        try:
            work()
        finally:
            sys.settrace(None)
        self.seconds[name] = time.perf_counter() - start
        for code in seen:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT) and str(path.parent.relative_to(ROOT)) in CHECKER:
                self.entering[f"{path.relative_to(ROOT)}:{code.co_firstlineno}"].append(name)


class _Collected:
    """A plugin of pytest: does something else with the tests that were collected than to run them all."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        self._work = work

    def pytest_runtestloop(self, session: Any) -> bool:
        """Of pytest."""
        self._work(session)
        return True


def _pytest(arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
    import pytest

    quick = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", "--tb=no"]
    return int(pytest.main([*quick, *arguments], plugins=list(plugins)))


def _run(session: Any, items: Sequence[Any], seconds: Mapping[str, float] | None = None) -> bool:
    """Whether tests pass; ends at the first that does not, and the process with one that takes far too long."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        if seconds is not None:
            signal.setitimer(signal.ITIMER_PROF, 5 + 3 * seconds[item.nodeid])
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


def _forked(work: Callable[[], bool], seconds: float = math.inf) -> bool:
    """What a function returns in a forked process; False where it fails, or computes for longer."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        good = False
        with suppress(BaseException), Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            if seconds < math.inf:
                signal.setitimer(signal.ITIMER_PROF, seconds)
            good = work()
        os._exit(0 if good else 1)
    return os.waitpid(child, 0)[1] == 0


def _trace(cache: Path, files: Sequence[str]) -> bool:
    """Write what `traced` reads; whether all tests passed. Collecting the tests is one of them, of the name ''."""
    trace, passed = _Trace(), list[bool]()

    def note(session: Any, item: Any) -> None:
        passed.append(_run(session, [item]))

    def each(session: Any) -> None:
        sys.settrace(None)
        for item in session.items:
            trace.run(item.nodeid, partial(note, session, item))

    trace.run("", lambda: _pytest(files, [_Collected(each)]))
    trace.seconds[""] = 0.0
    return all(passed) and bool(cache.write_text(json.dumps([trace.entering, trace.seconds])))


def traced(cache: Path, files: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Tests by the first line of the functions that they enter, and their seconds; measured once."""
    if not cache.exists() and not _forked(lambda: _trace(cache, files)):
        raise click.ClickException(f"{' '.join(files)} do not pass without a mutant")
    entering, seconds = json.loads(cache.read_text())
    return entering, seconds


def changed(mutant: Mutant) -> str:
    """The source of its file."""
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    return source[: mutant.start] + mutant.text + source[mutant.end :]


def _pairs(one: CodeType, two: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The code of functions before and after a change, where it differs."""
    inner, others = ([each for each in code.co_consts if isinstance(each, CodeType)] for code in (one, two))
    for before, after in zip(inner, others, strict=True):
        if before != after:
            yield before, after
            yield from _pairs(before, after)


def _codes(mutant: Mutant) -> dict[CodeType, CodeType]:
    """The code of functions without a mutant, and with it. Raises ValueError where it has other inner functions."""
    path = ROOT / mutant.file
    return dict(_pairs(*(compile(text, str(path), "exec") for text in (path.read_text("utf-8"), changed(mutant)))))


def exchangeable(mutant: Mutant) -> bool:
    """Whether a mutant is nothing but other code of functions."""
    with suppress(ValueError, SyntaxError):
        codes = _codes(mutant)
        return bool(codes) and all(one.co_freevars == two.co_freevars for one, two in codes.items())
    return False


def exchange(mutant: Mutant, session: Any, items: Sequence[Any], seconds: Mapping[str, float]) -> bool:
    """Whether tests pass with a mutant of a module that is imported already."""
    codes, path = _codes(mutant), str(ROOT / mutant.file)
    gc.unfreeze()  # `get_objects` omits frozen objects, such as the functions of collected tests
    functions = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
    own = [each for each in functions if each.__code__.co_filename == path and each.__code__ in codes]
    for function in own:
        function.__code__ = codes[function.__code__]
    return not own or _run(session, items, seconds)


def entered(mutant: Mutant, entering: dict[str, list[str]], seconds: dict[str, float], most: float) -> list[str]:
    """The tests that enter the function of a mutant, the fastest first, as far as they take so many seconds."""
    first, last = mutant.function
    within = (entering.get(f"{mutant.file}:{line}", ()) for line in range(first, last + 1))  # and its lambdas
    own = {test for each in within for test in each} if first else {""}
    if "" in own:  # it runs while tests are collected
        own = set(seconds)
    found = list[str]()
    for test in sorted(own, key=lambda each: (seconds[each], each)):
        most -= seconds[test]
        if most < 0 and found:
            break
        found.append(test)
    return found


def _imported(mutant: Mutant, tests: Sequence[str]) -> bool:
    """The same, of a module that is imported now."""
    sys.meta_path.insert(0, _Mutated(ROOT / mutant.file, changed(mutant)))
    return _pytest(tests) == 0


@click.command()
@click.option("--sample", type=int, help="As many mutants, drawn at random; without it, all.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--file", "files", multiple=True, help="Only of files of this name; may be given several times.")
@click.option("--tests", multiple=True, default=TESTS, show_default=True, help="Their folder, or some files.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=ROOT / "benchmarks/results/mutation.jsonl",
    show_default=True,
)
@click.option("--most", type=float, default=60.0, show_default=True, help="Seconds of tests for one mutant.")
def main(
    sample: int | None, seed: int, files: tuple[str, ...], tests: tuple[str, ...], output: Path, most: float
) -> None:
    """Run the mutants that are not in the output yet."""
    import flint  # noqa: F401 - imported once, before processes are forked
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import pytest  # noqa: F401

    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    entering, seconds = traced(output.with_suffix(".trace"), tests)
    every = sorted(path for folder in CHECKER for path in (ROOT / folder).glob("*.py"))
    paths = [path for path in every if not files or path.name in files]
    found = [each for path in paths for each in mutants(path)]
    chosen = found if sample is None else Random(seed).sample(found, min(sample, len(found)))  # noqa: S311

    def left() -> list[Mutant]:
        done = {json.loads(line)["mutant"] for line in output.read_text().splitlines()} if output.exists() else set()
        return [each for each in chosen if each.key not in done]

    def judge(mutant: Mutant, own: Sequence[str], survives: Callable[[], bool]) -> None:
        alive = not own or _forked(survives, 10 * sum(seconds[each] for each in own) + 20)
        with output.open("a") as file:
            file.write(json.dumps({"mutant": mutant.key, "survives": alive, "tests": len(own)}) + "\n")

    def exchanged(session: Any) -> None:
        items = {item.nodeid: item for item in session.items}
        for mutant in left():
            own = entered(mutant, entering, seconds, most)
            if "" not in own and exchangeable(mutant):
                judge(mutant, own, partial(exchange, mutant, session, [items[each] for each in own], seconds))

    _forked(lambda: _pytest(tests, [_Collected(exchanged)]) == 0)
    for mutant in left():
        own = [each for each in entered(mutant, entering, seconds, most) if each]
        judge(mutant, own, partial(_imported, mutant, own))


if __name__ == "__main__":
    main()
