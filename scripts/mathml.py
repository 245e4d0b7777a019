r"""Formulas of the documentation as MathML for browsers: $x^2$ in a line, $$x^2$$ as a paragraph.

An extension of Python-Markdown. GitHub renders the same source itself. `pymdownx.arithmatex` finds
the formulas and puts \(x^2\) or \[x^2\] into elements of its class, which this module translates.
"""

import html
import re
from typing import Any, Literal

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor

FOUND = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
AFTER_ARITHMATEX = 0  # whose own postprocessing has put the formulas back by then


class _Formulas(Postprocessor):
    def run(self, text: str) -> str:
        return FOUND.sub(
            lambda found: mathml(
                html.unescape(found[2]), "block" if found[1] == "div" else "inline"
            ),
            text,
        )


class MathML(Extension):
    """For `Markdown(extensions=...)`, after `pymdownx.arithmatex` with `generic`."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(_Formulas(md), "mathml", AFTER_ARITHMATEX)


def mathml(latex: str, display: Literal["inline", "block"] = "inline") -> str:
    """Returns a <math> element."""
    return convert(latex.strip(), display=display)


def makeExtension(**options: Any) -> MathML:
    """Called by Python-Markdown for a module that is named as an extension."""
    return MathML(**options)
