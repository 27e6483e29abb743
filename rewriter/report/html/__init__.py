"""A report as a page that people read: one self-contained HTML file, with figures and without a network.

`write_page` and `render` take a `rewriter.report.report.Report`; `Verdict` replaces the words at its top. jinja2, from
the extra `report`, is imported only when a page is made.
"""

from rewriter.report.html.page import render, require_jinja, write_page
from rewriter.report.html.verdict import Verdict

__all__ = ["Verdict", "render", "require_jinja", "write_page"]
