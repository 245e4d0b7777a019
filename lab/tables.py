"""Prints tables of results on stdout."""

import json
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Columns of a stdout that is not a terminal, where nothing may be truncated.
FILE_COLUMNS = 200


def result_console(stdout: IO[str]) -> "Console":
    from rich.console import Console

    width = None if stdout.isatty() else FILE_COLUMNS
    # Names of files and models may have brackets and colons.
    return Console(file=stdout, width=width, highlight=False, markup=False, emoji=False)


def print_json(stdout: IO[str], document: Any) -> None:
    stdout.write(json.dumps(document, separators=(",", ":")) + "\n")
    stdout.flush()


def result_table(title: str, *headers: str, rows: Iterable[Iterable[str]] = ()) -> "Table":
    """Creates a table whose first column is for names and whose other columns are for numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for index, header in enumerate(headers):
        table.add_column(Text(header), justify="left" if index == 0 else "right")
    for cells in rows:
        table.add_row(*cells)
    return table
