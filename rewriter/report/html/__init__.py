"""A report as a self-contained HTML page; jinja2, from the extra `report`, is imported only when a page is rendered."""

from rewriter.report.html.page import render, require_jinja, write_page

__all__ = ["render", "require_jinja", "write_page"]
