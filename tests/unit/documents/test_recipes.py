"""Recipes: commands can be read, agree with the network's file; the tables' figures hold."""

import re
import shlex
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from cli.main import app
from scripts.docs_tables import MODELS
from tests.harness.documents import ROOT
from tests.harness.official import FOLDER, Official, official
from workers.engines.options import EngineOptions

PAGE = (ROOT / "docs" / "recipes.md").read_text()
GPUS_OF_A_HOST = 8
VLLMS_OWN_UTILIZATION = "0.92"
_COMMAND = re.compile(
    r"^# (?P<title>\S+): (?P<file>node-config-[\w-]+)\.json\n(?P<text>proofline .*?)\n(?=\n|```)",
    flags=re.DOTALL | re.MULTILINE,
)


class Recipe(NamedTuple):
    title: str  # GPU and variant
    file: str
    text: str

    def __str__(self) -> str:
        return self.file

    @property
    def official(self) -> Official:
        name = self.file.removeprefix("node-config-")
        return next(found for found in official() if found.file == f"{name}-node1")

    @property
    def model(self) -> str:
        return MODELS[self.file.removeprefix("node-config-").split("-")[0]]


RECIPES = [Recipe(**found.groupdict()) for found in _COMMAND.finditer(PAGE)]


def value(words: list[str], name: str, default: str = "") -> str:
    return words[words.index(name) + 1] if name in words else default


def without(words: list[str], *names: str) -> list[str]:
    """The words but for these arguments and their values."""
    places = [place for name in names if name in words for place in [words.index(name)]]
    return [word for i, word in enumerate(words) if i not in places and i - 1 not in places]


def table(heading: str) -> list[dict[str, str]]:
    """The rows of the first table below it, by column."""
    lines = PAGE.split(f"\n## {heading}\n\n")[1].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def gigabytes(cell: str) -> int:
    found = re.match(r"([\d,]+) GB", cell)
    assert found, cell
    return int(found[1].replace(",", ""))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineOptions, int]]:
    """(options, workers) with which `up` would start a node, in place of the node."""
    calls: list[tuple[EngineOptions, int]] = []

    def stack(options: EngineOptions, **given: Any) -> Any:
        calls.append((options, given["workers"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("cli.supervise.up.Stack", stack)
    return calls


def test_every_file_of_the_network_has_a_command() -> None:
    assert sorted(recipe.file for recipe in RECIPES) == sorted(
        path.stem for path in FOLDER.glob("node-config-*.json")
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_command_starts_what_the_network_deploys(
    recipe: Recipe, started: list[tuple[EngineOptions, int]]
) -> None:
    command = shlex.split(recipe.text.replace("\\\n", " "))
    assert command[0] == "proofline"
    CliRunner().invoke(app, command[1:])
    [(options, workers)] = started
    deployed = recipe.official
    assert (options.model, options.name) == (deployed.model, deployed.name)
    assert options.tensor_parallel == int(value(deployed.words, "--tensor-parallel-size"))
    assert list(options.vllm_args) == without(
        deployed.words, "--tensor-parallel-size", "--served-model-name"
    )
    assert workers * options.n_devices == GPUS_OF_A_HOST


def test_the_table_has_a_row_for_each_command() -> None:
    rows = [(row["Model"], row["GPU, variant"]) for row in table("GPUs and nonces a minute")]
    assert rows == [(recipe.model, recipe.title) for recipe in RECIPES]


@pytest.mark.parametrize(
    ("row", "recipe"),
    list(zip(table("GPUs and nonces a minute"), RECIPES, strict=True)),
    ids=lambda parameter: str(parameter) if isinstance(parameter, Recipe) else "",
)
def test_memory_that_is_left_can_be_computed_again(row: dict[str, str], recipe: Recipe) -> None:
    words = recipe.official.words
    [kind] = re.findall(r"[ABH]\d00", row["GPU, variant"])
    each = next(
        gigabytes(line.split("|")[2].strip())
        for line in PAGE.splitlines()
        if re.match(rf"\| [^|]*\b{kind}\b[^|]*\| \d+ GB \|", line)
    )
    [weights] = [
        gigabytes(line["Weights on disk and in VRAM"])
        for line in table("Models")
        if line["Model"] == row["Model"]
    ]
    engine = int(value(words, "--tensor-parallel-size"))
    share = float(value(words, "--gpu-memory-utilization", VLLMS_OWN_UTILIZATION))
    assert int(row["GPUs per engine"]) == engine
    assert gigabytes(row["VRAM left"]) == round(engine * each * share - weights)


@pytest.mark.parametrize("row", table("Models"), ids=lambda row: row["Model"])
def test_the_parsers_are_those_of_the_commands(row: dict[str, str]) -> None:
    commands = [r.official.words for r in RECIPES if r.model == row["Model"]]
    for column, name in (
        ("Tool parser", "--tool-call-parser"),
        ("Reasoning parser", "--reasoning-parser"),
    ):
        named = {value(words, name) for words in commands} - {""}
        assert set(re.findall(r"`(\w+)`", row[column])) == named
