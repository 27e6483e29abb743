"""The navigation of the documentation site leads to every page; .ci/run builds it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAVIGATION = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
PAGES = "index", "api", "gallery", "models", "benchmarks", "contributing", "changelog", "security"


def test_every_page_is_in_the_navigation() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("decisions/")}
    assert pages | {f"{each}.md" for each in PAGES} | {"decisions/index.md"} == NAVIGATION
