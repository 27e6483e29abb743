"""A report as a self-contained HTML page with figures.

`write_page` and `render` take a `rewriter.report.report.Report`; a `Verdict` replaces the text at the top. jinja2, from
the extra `report`, is imported only when a page is made.
"""

from rewriter.report.html.page import render, write_page
from rewriter.report.html.rendering import require_jinja
from rewriter.report.html.verdict import Verdict

__all__ = ["Verdict", "render", "require_jinja", "write_page"]
