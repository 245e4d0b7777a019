"""Writes the generated parts of pages from code, tests and their data: `make docs-tables`.

A generated part is between two comments: `<!-- generated: NAME -->` and `<!-- end -->`.
scripts/tests/test_docs_tables.py fails if a page differs.
"""

import ast
import inspect
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import typer

from cli.main import app
from poc_core.settings import Settings
from scripts.build_docs import ROOT
from tests.harness.official import official

_WIDTH = 120  # columns of a command
MODELS = {
    "minimaxm27": "MiniMax-M2.7",
    "deepseekv4flash0731": "DeepSeek-V4-Flash",
    "glm53flash": "GLM-5.3-Flash",
    "kimik26": "Kimi-K2.6",
    "qwen235B": "Qwen3-235B-A22B",
}


def table(head: str, rows: Iterator[str]) -> str:
    return "\n".join([f"| {head} |", "|---" * head.count(" | ") + "|---|", *rows])


def meanings_of_settings() -> dict[str, str]:
    """Returns the docstring below each setting."""
    meanings = {}
    for theme in Settings.__bases__:
        for one, below in pairwise(ast.parse(inspect.getsource(theme)).body[0].body):  # type: ignore[attr-defined]
            match one, below:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    meanings[name] = " ".join(text.split())
    return meanings


def settings() -> str:
    def rows() -> Iterator[str]:
        meanings = meanings_of_settings()
        for name, field in Settings.model_fields.items():
            default = "unset" if field.default is None else f"`{field.default}`"
            yield f"| `POC_{name.upper()}` | {default} | {meanings[name]} |"

    return table("Variable | Default | Meaning", rows())


def commands() -> str:
    """Returns a table with the first sentence of each command's help."""

    def rows() -> Iterator[str]:
        for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
            if not command.hidden:
                first = " ".join((command.help or "").split("\n\n")[0].split()).split(". ")[0]
                yield f"| `proofline {name}` | {first.rstrip('.')} |"

    return table("Command | What it does", rows())


def recipes() -> str:
    """Returns a command for each of the network's node configurations, by model."""
    found = defaultdict(list)
    for deployment in official():
        file, _, node = deployment.file.rpartition("-")
        if node != "node1":  # further nodes of a file have the same arguments
            continue
        model, gpu = file.split("-", 1)
        words = list(deployment.words)
        parallel = int(taken(words, "--tensor-parallel-size"))
        command = f"proofline up --data-dir /var/lib/proofline --workers {8 // parallel}"
        command += f" --tensor-parallel {parallel} --model {deployment.model}"
        if name := taken(words, "--served-model-name"):
            command += f" --served-model-name {name}"
        text = wrapped(f"{command} --", shlex.join(words).split(" --"))
        found[model].append(f"# {gpu}: node-config-{model}-{gpu}.json\n{text}\n")
    return "\n".join(
        f"### {title}\n\n<!-- not run: needs 8 GPUs -->\n```sh\n{chr(10).join(found[model])}```\n"
        for model, title in MODELS.items()
    ).rstrip()


def taken(words: list[str], option: str) -> str:
    """Removes the option with its value from the words, and returns the value or nothing."""
    if option not in words:
        return ""
    place = words.index(option)
    return [words.pop(place), words.pop(place)][1]


def wrapped(first: str, options: list[str]) -> str:
    """Returns the command on several lines; options stay together with their values."""
    lines = [first, ""]
    for option in (f"--{option.removeprefix('--')}" for option in options):
        if len(lines[-1]) + len(option) > _WIDTH - 7:
            lines.append("")
        lines[-1] += f" {option}"
    return " \\\n   ".join(lines)


def promises() -> str:
    """Returns a table of promises (`pytest.mark.promise`) with the files of their tests."""
    found: defaultdict[str, set[tuple[str, Path]]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "mark.promise(" in (text := path.read_text()):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
                    who, promise = (ast.literal_eval(argument) for argument in node.args)
                    found[who].add((promise, path))

    def rows() -> Iterator[str]:
        for who, held in sorted(found.items()):
            paths = sorted({path.relative_to(ROOT) for _, path in held})
            links = (f"[{path.stem.removeprefix('test_')}]({path})" for path in paths)
            subject = who[0].upper() + who[1:]
            sentences = (f"{subject} {promise}." for promise in sorted({p for p, _ in held}))
            yield f"| {'<br>'.join(sentences)} | {' '.join(links)} |"

    return table("Promise | Tests", rows())


def trained() -> dict[str, str]:
    """Returns the tables of `python -m bench.trained` by page."""
    parts = (ROOT / "bench/results/trained.md").read_text().split("\n## ")[1:]
    return {page: text.strip() for page, _, text in (part.partition("\n") for part in parts)}


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "docs/settings.md": ("settings", settings),
    "docs/commands.md": ("commands", commands),
    "docs/recipes.md": ("recipes", recipes),
    "SECURITY.md": ("promises", promises),
    **{page: ("trained", partial(str, text)) for page, text in trained().items()},
}


def current(page: str) -> str:
    """Returns the page's text with its generated part up to date."""
    name, made = PARTS[page]
    begin, text = f"<!-- generated: {name} -->\n", (ROOT / page).read_text()
    before, rest = text.split(begin)
    return f"{before}{begin}\n{made()}\n\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"


if __name__ == "__main__":
    for page in PARTS:
        Path(ROOT / page).write_text(current(page))
