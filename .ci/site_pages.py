"""Pages of the site that are not files of docs/: those at the root of the checkout, and those made from the code.

A hook of mkdocs. Links are written for the checkout, where GitHub shows them; here they are turned to the site's pages.
"""

import inspect
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "models/README.md": "models.md",
    "benchmarks/README.md": "benchmarks.md",
    "docs/decisions/": "decisions/index.md",
}
"""File of the checkout to page of the site; docs/X becomes X."""

_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that docs/ does not have."""
    made = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in MOVED.items() if name.endswith(".md")}
    made["index.md"] = _with_a_result(made["index.md"])
    made["decisions/index.md"] = _decisions()
    made["gallery.md"] = _gallery()
    made["api.md"] = _functions()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the checkout into links to pages."""
    here = page.file.src_uri
    place = next((name for name, moved in MOVED.items() if moved == here), f"docs/{here}")
    folder = PurePosixPath(place).parent if not place.endswith("/") else PurePosixPath(place)

    def turned(match: re.Match[str]) -> str:
        target, sign, anchor = match[2].partition("#")
        if not target or "://" in target:
            return match[0]
        file = os.path.normpath(folder / target) + ("/" if target.endswith("/") else "")
        to = MOVED.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
        if to is None:  # a file that is not on the site: its name is enough
            return match[1].removesuffix("](").lstrip("!").removeprefix("[")
        return f"{match[1]}{os.path.relpath(to, PurePosixPath(here).parent)}{sign}{anchor}{match[3]}"

    # Code is not text: what looks like a link in it is none.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(turned, part) for part in parts)


def _with_a_result(readme: str) -> str:
    """The README with a picture of what one gets beside its drawing, both above the fold."""
    drawing = re.search(r"^!\[.*?\]\(.*?\)$", readme, re.DOTALL | re.MULTILINE)
    if drawing is None:
        raise ValueError("the README has no drawing")
    page = "[![A page of heads, original ones and neurons](docs/figures/heads-page.png)](heads.md#a-page-of-heads)"
    both = f'<div class="result" markdown>\n\n{drawing[0]}\n\n{page}\n\n</div>'
    return readme.replace(drawing[0], both)


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def _decisions() -> str:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    lines = [f"- [{_title(path)}]({path.name})" for path in pages]
    return "\n".join(["# Decisions", "", "Each with its context, alternatives and consequences.", "", *lines, ""])


def _gallery() -> str:
    """Every drawing, each with a link to what explains it."""
    text = (ROOT / "docs" / "programs.md").read_text(encoding="utf-8")
    lines = [
        "# Gallery",
        "",
        "What the heads of one neuron attend to, as a function of its pre-activation: one drawing for each activation,",
        "made from the programs of the code. Each leads to its formulas.",
        "",
    ]
    for path in sorted((ROOT / "docs" / "figures" / "programs").glob("*.svg")):
        name = path.stem
        anchor = f"#{name}" if re.search(rf"^#+ {re.escape(name)}$", text, re.MULTILINE) else ""
        lines += [f"## {name}", "", f"[![Attention of {name}](figures/programs/{path.name})](programs.md{anchor})", ""]
    others = {
        "neuron-head": ("One neuron as one head", "index.md"),
        "error-powers": ("GELU in powers of one exponential", "programs.md"),
        "error-line": ("A line as attention", "programs.md"),
        "error-propagation": ("Errors through 48 layers", "programs.md"),
        "performance": ("Time against length", "performance.md"),
    }
    for name, (title, page) in others.items():
        lines += [f"## {title}", "", f"[![{title}](figures/{name}.svg)]({page})", ""]
    return "\n".join([*lines, "[A report of a conversion](example-report.html) is a separate page.", ""])


def _functions() -> str:
    """Every public function and class, from its docstring."""
    import docstring_parser

    import rewriter

    lines = [
        "# Python, every function",
        "",
        "Made from the docstrings of `rewriter`; [Python](python.md) introduces them.",
        "",
    ]
    for name in sorted({*dir(rewriter)} - {"__version__"}, key=lambda each: (each[0].isupper(), each)):
        found = getattr(rewriter, name)
        kind = "Arguments" if inspect.isfunction(found) else "Attributes"
        parsed = docstring_parser.parse(inspect.getdoc(found) or "")
        call = f"{name}{inspect.signature(found)}" if inspect.isfunction(found) else f"class {name}"
        lines += [f"## {name}", "", "```text", _wrapped(call), "```", "", *_prose(parsed.description), ""]
        for title, entries in ((kind, parsed.params), ("Raises", parsed.raises)):
            if entries:
                rows = [
                    f"- `{getattr(each, 'arg_name', None) or each.type_name}`: {_line(each.description)}"
                    for each in entries
                ]
                lines += [f"**{title}**", "", *rows, ""]
        if parsed.returns is not None:
            lines += [f"**Returns** {_line(parsed.returns.description)}", ""]
    return "\n".join(lines)


def _wrapped(call: str) -> str:
    return call.replace("(", "(\n    ", 1).replace(", ", ",\n    ") if len(call) > 100 else call


def _prose(text: str | None) -> list[str]:
    # Indented parts of a docstring are lists of options or examples.
    return [
        re.sub(r"([*_<])", r"\\\1", line) if not line.startswith("    ") else line for line in (text or "").splitlines()
    ]


def _line(text: str | None) -> str:
    return re.sub(r"([*_<\[])", r"\\\1", " ".join((text or "").split()))
