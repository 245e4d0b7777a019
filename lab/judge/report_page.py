"""Formats a report as one HTML file that contains its pictures."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from lab.judge.report_findings import Findings

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #8886; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; background: #fff; }
.wide { overflow-x: auto; }
"""


def page(findings: Findings, pictures: Sequence[tuple[Path, str, str]]) -> str:
    """Returns the HTML text of the report. `pictures`: file, heading and alternative text of each
    picture.
    """
    rules, *others = (table(*one) for one in findings.tables())
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        (
            "<title>Proofline"
            f" report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>Proofline"
            " report</h1>"
        ),
        *(f"<p>{escape(sentence)}</p>" for sentence in findings.sentences()),
        rules,
        *(figure(*picture) for picture in pictures),
        *others,
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<h2>{escape(heading)}</h2>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def figure(picture: Path, heading: str, words: str) -> str:
    data = base64.b64encode(picture.read_bytes()).decode("ascii")
    return (
        f'<h2>{escape(heading)}</h2>\n<img alt="{escape(words)}"'
        f' src="data:image/png;base64,{data}">'
    )
