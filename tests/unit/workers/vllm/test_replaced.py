"""What of vLLM is replaced at run time stands in one table (docs/architecture.md)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
VLLM = ROOT / "workers" / "vllm"
HEADING = "## Replaced in vLLM at run time"
# Whose attributes are our own, or belong to one request, step or start; and single ones of these.
OBJECTS = """
    _args args bare child common communicator config.structured_outputs_config engine_args flat
    main of_prompt one output parallel params part plain processor sampling_params state app.state
    worker gate validations place held trial _gates _graphs _caches _schemes _stand_ins[ROUTER]
    engine found.cumulative_logprob found.logprobs found.prompt_logprobs
"""
NOT_REPLACED = set(OBJECTS.split())
# Functions that set an attribute by a name, and where the name stands.
SETTERS = {"setattr": 1, "instead": 1}


def replaced(module: ast.Module) -> Iterator[str]:
    """The attributes that a module sets on what is not itself, in words of its code."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value).startswith("vars("):
                yield "vars." + ast.unparse(node.slice).strip("'")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in SETTERS:
            name = node.args[SETTERS[ast.unparse(node.func)]]
            if isinstance(name, ast.Constant):
                yield f"of.{name.value!s}"


def in_code() -> dict[str, set[str]]:
    """By module, the last names of what it replaces."""
    found: dict[str, set[str]] = {}
    for path in VLLM.rglob("*.py"):
        for said in replaced(ast.parse(path.read_text())):
            said = said.removeprefix("self.")
            of, _, name = said.rpartition(".")
            if of and not NOT_REPLACED & {said, of}:
                found.setdefault(str(path.relative_to(VLLM)), set()).add(name)
    return found


def in_the_table() -> dict[str, set[str]]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = text.partition(HEADING)[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {
        module: {one.rpartition(".")[2] for one in re.findall(r"`([^`]+)`", names)}
        for modules, names, *_ in rows
        for module in re.findall(r"`([^`]+)`", modules)
    }


def test_what_is_replaced_stands_in_the_table() -> None:
    table = in_the_table()
    missing = {
        module: names - table.get(module, set())
        for module, names in in_code().items()
        if names - table.get(module, set())
    }
    assert missing == {}


def test_the_table_has_nothing_that_is_not_replaced() -> None:
    for module, names in in_the_table().items():
        text = (VLLM / module).read_text()
        assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set(), module
    assert sum(map(len, in_the_table().values())) > 30
