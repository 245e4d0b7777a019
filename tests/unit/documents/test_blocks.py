"""Fenced blocks: each is read in its language; shell and Python run in a test or say why not."""

import ast
import json
import os
import re
import shutil
import subprocess
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from tests.harness.documents import DOCUMENTS, ROOT, Block, blocks

ALL = [block for document in DOCUMENTS for block in blocks(document)]
WHY_NOT = re.compile(r"not run: (\S.{10,})", re.DOTALL)
# How tests name the section whose blocks they run.
RUN = re.compile(r'examples\("([\w/.]+\.md)", "([^"]+)"\)')


def of(*kinds: str) -> list[Block]:
    return [block for block in ALL if block.kind in kinds]


def sections_that_run() -> set[tuple[str, str]]:
    tests = [
        *(ROOT / "tests" / "integration").rglob("*.py"),
        *(ROOT / "tests" / "unit").rglob("*.py"),
    ]
    named = {
        found for test in tests if test != Path(__file__) for found in RUN.findall(test.read_text())
    }
    return {(document, section) for document, section in named if ROOT / document in DOCUMENTS}


def test_every_block_names_its_language() -> None:
    assert len(ALL) > 15
    known = {"sh", "python", "go", "js", "json", "yaml", "toml", "ini", "text"}
    assert [str(block) for block in ALL if block.kind not in known] == []


def test_nothing_is_fenced_that_these_tests_do_not_see() -> None:
    for document in DOCUMENTS:
        fences = re.findall(r"^[ >]*```", document.read_text(), flags=re.MULTILINE)
        assert len(fences) == 2 * len(list(blocks(document))), document


def test_what_can_run_runs_in_a_test_or_says_why_not() -> None:
    runs = sections_that_run()
    assert runs
    silent = [
        str(block)
        for block in of("sh", "python", "go", "js")
        if not WHY_NOT.match(block.comment) and (block.document, block.section) not in runs
    ]
    assert silent == [], (
        "run them (tests/integration/host/test_readme_examples.py), or above each: <!-- not run:"
        " WHY -->"
    )


def test_sections_that_tests_run_have_something_to_run() -> None:
    runnable = {
        (block.document, block.section)
        for block in of("sh", "python", "js")
        if not WHY_NOT.match(block.comment)
    }
    assert sections_that_run() - runnable == set()


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_shell_blocks_are_shell(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # A name in angle brackets would be a redirection.
    assert not re.search(r"<[a-z-]+>", block.text)


@pytest.mark.parametrize("block", of("python", "json", "yaml", "toml", "ini"), ids=str)
def test_other_blocks_can_be_read(block: Block) -> None:
    match block.kind:
        case "python":
            ast.parse(block.text)
        case "json":
            json.loads(block.text)
        case "yaml":
            list(yaml.safe_load_all(block.text))
        case "toml":
            tomllib.loads(block.text)
        case _:
            ConfigParser(inline_comment_prefixes="#").read_string(f"[it]\n{block.text}")


def test_go_blocks_are_whole_programs() -> None:
    assert of("go")
    for block in of("go"):
        assert block.text.startswith("package main\n"), block
        assert block.text.count("{") == block.text.count("}"), block
        # Formatted as by gofmt.
        assert not re.search(r"^ |[ \t]$", block.text, flags=re.MULTILINE), block


@pytest.mark.slow
def test_go_blocks_compile_where_go_is(tmp_path: Path) -> None:
    """The compiler makes its standard library first, which takes minutes on a small machine."""
    if go := shutil.which("go"):
        for number, block in enumerate(of("go")):
            program = tmp_path / f"program{number}.go"
            program.write_text(block.text)
            home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
            done = subprocess.run(
                [go, "vet", program], capture_output=True, text=True, cwd=tmp_path, env=home
            )
            assert done.returncode == 0, done.stderr
