"""No function takes more parameters than a reader keeps in mind."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ["api", "workers", "poc_core", "cli", "lab", "proofline"]
FOLDERS += ["bench", "tests", "scripts", "models"]
MOST, MOST_OF_A_COMMAND = 8, 12

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    """Each function of the project, with where it is."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, Function):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def parameters(function: Function) -> list[ast.arg]:
    of = function.args
    return [one for one in (*of.posonlyargs, *of.args, *of.kwonlyargs) if one.arg != "self"]


def is_command(function: Function) -> bool:
    """Whether typer fills in parameters, from a command line."""
    said = [ast.unparse(one.annotation) for one in parameters(function) if one.annotation]
    return any("typer." in one or "options." in one for one in said)


def is_kernel(function: Function) -> bool:
    """Whether Triton compiles the function, which gets each pointer by itself."""
    return any(ast.unparse(one).startswith("triton.jit") for one in function.decorator_list)


def test_a_function_has_at_most_8_parameters_and_a_command_12() -> None:
    too_many = {
        where: len(parameters(one))
        for where, one in functions()
        if len(parameters(one)) > (MOST_OF_A_COMMAND if is_command(one) else MOST)
        and not is_kernel(one)
    }
    assert too_many == {}
