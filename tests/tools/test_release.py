"""Lock files of a release pin every dependency."""

import tomllib

from tools.release.__main__ import DEV_EXTRAS, LOCKED, ROOT, pins

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
