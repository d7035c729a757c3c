"""Formulas of the documentation as MathML, which browsers draw by themselves: a hook of mkdocs."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_others: Any) -> str:
    """Put MathML in the place of every formula that arithmatex has marked."""
    return FORMULA.sub(as_mathml, html)


def as_mathml(found: re.Match[str]) -> str:
    """Return one formula, in the line or on lines of its own."""
    _, bracket, latex = found.groups()
    if bracket == "[":
        return f'<div class="formula">{convert(unescape(latex), display="block")}</div>'
    return str(convert(unescape(latex), display="inline"))
