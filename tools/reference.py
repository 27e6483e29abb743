"""`python -m tools.reference`: the option tables of docs/reference.md, from the dataclasses that declare them."""

import re
from importlib import import_module
from pathlib import Path

from rewriter.options import Option, options_of

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
_TABLE = re.compile(r"(<!-- (options|rare options): ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_PLACEHOLDERS = {int: "N", float: "X"}


def made(text: str) -> str:
    """The page with its tables made anew."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[3], rare=found[2] != 'options')}\n{found[4]}", text)


def _table(name: str, *, rare: bool) -> str:
    module, _, kind = name.rpartition(".")
    rows = [_row(each) for each in options_of(getattr(import_module(module), kind)) if each.rare == rare]
    return "\n".join(["| option | meaning |", "| --- | --- |", *rows])


def _row(option: Option) -> str:
    flag, sign = (option.name, "=") if option.rare else (option.command_line, " ")
    value = "|".join(option.choices) or option.metavar or _PLACEHOLDERS.get(option.kind, "")
    value = sign + value if value else ""
    text = option.help[0].lower() + option.help[1:].rstrip(".")
    if option.default not in (None, False, (), {}):
        text += f"; default {option.default:g}" if isinstance(option.default, float) else f"; default {option.default}"
    text += f"; see {_link(option.see)}" if option.see else ""
    value = value.replace("|", "\\|")
    return f"| `{flag}{value}` | {text.replace('|f|', _F).replace('|y|', _Y)} |"


_F, _Y = "\\|f\\|", "\\|y\\|"


def _link(page: str) -> str:
    name = page.partition("#")[0].rpartition("/")[2].removesuffix(".md")
    return f"[{f'decision {name[:4]}' if page.startswith('decisions/') else name}]({page})"


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
