"""What documents link to or name exists: make targets, settings, commands, services."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from poc_core.settings import Settings
from tests.harness import compose_file
from tests.harness.commands import COMMANDS
from tests.harness.documents import DOCUMENTS, ROOT, anchors, blocks, name, without_blocks

ELSEWHERE = ("http://", "https://", "mailto:")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(document.read_text())):
        if target.startswith(ELSEWHERE):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_lists_and_tables_begin_after_an_empty_line(document: Path) -> None:
    """GitHub does not need it, the site does: else they are one paragraph with the line above."""
    lines = without_blocks(document.read_text()).splitlines()
    for before, line in itertools.pairwise(lines):
        for begins in (r"(?:[*-]|\d+\.) ", r"\|"):
            if re.match(begins, line) and before.strip() and not before.startswith("  "):
                assert re.match(begins, before), f"{document.name}: {line}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        target
        for file in DOCUMENTS
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", file.read_text(), flags=re.MULTILINE)
    }
    assert named
    assert named - targets == set()


def test_settings_named_in_the_documents_exist() -> None:
    known = {f"POC_{field.upper()}" for field in Settings.model_fields}
    for file in DOCUMENTS:
        assert set(re.findall(r"\bPOC_[A-Z_]+\b", file.read_text())) <= known, file.name


def invocations() -> Iterator[tuple[str, list[str]]]:
    """(document, words after `proofline`) of every command line in a block or between backticks."""
    for document in DOCUMENTS:
        text = document.read_text()
        inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", without_blocks(text))
        indented = re.findall(r"^    (.*(?:\\\n.*)*)", without_blocks(text), flags=re.MULTILINE)
        lines = [
            line
            for block in blocks(document)
            if block.kind == "sh"
            for line in joined(block.text).splitlines()
        ]
        for line in [*inline, *map(joined, indented), *lines]:
            line = re.sub(r"\bkubectl [^|;&)]*", "", line)  # whose namespace has the command's name
            for found in re.finditer(r"(?:^|[\s(]|bin/)proofline ([^#|;&)]*)", line):
                yield name(document), found[1].split()


def joined(text: str) -> str:
    """Lines that a backslash continues, as one."""
    return text.replace("\\\n", " ")


def test_commands_named_in_the_documents_exist_with_their_options() -> None:
    seen = set()
    for document, words in invocations():
        command = COMMANDS
        while words and (inner := getattr(command, "commands", {}).get(words[0])):
            command, words = inner, words[1:]
            seen.add(inner.name)
        assert command is not COMMANDS or not words or words[0].startswith("--"), (
            f"{document}: proofline {words}"
        )
        known = {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        words = words[: words.index("--")] if "--" in words else words
        named = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert named - known - {"--help"} == set(), f"{document}: proofline {command.name}"
    assert len(seen) > 10


def test_services_that_docker_is_asked_about_exist() -> None:
    network = (ROOT / "tests" / "docker" / "network").glob("*.yml")
    services = set(compose_file.services())
    services |= {name for file in network for name in yaml.safe_load(file.read_text())["services"]}
    asked = re.compile(r"docker compose (?:exec|restart|logs -f) (?!SERVICE)([a-z][\w-]*)")
    named = {service for file in DOCUMENTS for service in asked.findall(file.read_text())}
    assert named
    assert named - services == set()
