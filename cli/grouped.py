"""Lets a command receive several related options as one NamedTuple parameter."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command so that each field of its NamedTuple parameters becomes an option."""
    flat: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        group = parameter.annotation
        if not hasattr(group, "_fields"):
            flat.append(parameter)
            continue
        groups[name] = group
        hints = get_type_hints(group, include_extras=True)
        for field in group._fields:
            default = group._field_defaults.get(field, inspect.Parameter.empty)
            flat.append(parameter.replace(name=field, default=default, annotation=hints[field]))

    @functools.wraps(command)
    def with_fields(**given: Any) -> None:
        made = {
            name: group(**{field: given.pop(field) for field in group._fields})
            for name, group in groups.items()
        }
        command(**made, **given)

    return with_parameters(with_fields, flat)


def with_parameters(
    command: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Makes Typer read a command's options from `parameters`, all of them keyword-only."""
    kind = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([parameter.replace(kind=kind) for parameter in parameters])
    vars(command)["__signature__"] = signature  # Typer reads both
    command.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }
    return command
