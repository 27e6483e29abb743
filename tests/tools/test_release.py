"""What a release is made of: lock files that pin everything, archives without traces of the machine, a whole wheel."""

from __future__ import annotations

import io
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools.release.__main__ import (
    DEV_EXTRAS,
    LOCKED,
    NEEDED,
    ROOT,
    normalised,
    pins,
    wrong_contents,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {each.split(">")[0].split("[")[0] for each in requirements} - {"attnonly"}


def test_lock_files_pin_what_is_asked_for() -> None:
    runtime, dev = pins(LOCKED / "runtime.txt"), pins(LOCKED / "dev.txt")
    assert names(PROJECT["dependencies"]) <= {*runtime}
    wanted = set().union(*(names(PROJECT["optional-dependencies"][extra]) for extra in DEV_EXTRAS))
    assert wanted <= {*dev}
    assert {name: dev[name] for name in runtime} == runtime
    assert "torch" not in dev


@pytest.mark.parametrize(
    "text", ["numpy>=1\n", "numpy==1.0\n", "numpy==1.0 \\\n    --hash=md5:00\n", "--index-url https://example.org\n"]
)
def test_what_is_no_lock(text: str, tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"not pinned|no SHA-256"):
        pins(tmp_path / "lock.txt")


def archive(order: list[str], mtime: int, user: str, mode: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name in order:
            member = tarfile.TarInfo(f"a-1/{name}")
            member.size, member.mtime, member.uname, member.mode = len(name), mtime, user, mode
            tar.addfile(member, io.BytesIO(name.encode()))
    return made.getvalue()


def test_archives_without_traces_of_the_machine() -> None:
    one, other = archive(["x", "y"], 1, "ann", 0o600), archive(["y", "x"], 2, "bob", 0o664)
    assert one != other
    assert normalised(one, 7) == normalised(other, 7) != normalised(one, 8)
    with tarfile.open(fileobj=io.BytesIO(normalised(one, 7))) as tar:
        assert {each.name: (each.mtime, each.mode, each.uname) for each in tar} == {
            "a-1/x": (7, 0o644, ""),
            "a-1/y": (7, 0o644, ""),
        }
        assert tar.extractfile("a-1/y").read() == b"y"  # type: ignore[union-attr]


def test_contents_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "attnonly-0.1.0-py3-none-any.whl"
    tracked = ["rewriter/__init__.py", "passes/fit/model.py", *NEEDED, "attnonly-0.1.0.dist-info/RECORD"]
    for name in tracked[:2]:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    with zipfile.ZipFile(wheel, "w") as made:
        for name in tracked:
            made.writestr(name, "")
    assert wrong_contents(wheel, tmp_path) == []
    with zipfile.ZipFile(wheel, "w") as made:
        for name in (*tracked, "tests/oracle.py", "rewriter/notes.txt"):
            if name not in (NEEDED[0], tracked[0]):
                made.writestr(name, "")
    assert wrong_contents(wheel, tmp_path) == [
        "rewriter/notes.txt is in it",
        "tests/oracle.py is in it",
        f"{NEEDED[0]} is missing",
        f"{tracked[0]} is missing",
    ]
