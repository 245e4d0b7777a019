"""Lets a command take options that belong together as one parameter."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Turns each field of a NamedTuple parameter into an option on the command line."""
    flat: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        group = parameter.annotation
        if not hasattr(group, "_fields"):
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = group
        hints = get_type_hints(group, include_extras=True)
        for field in group._fields:
            default = group._field_defaults.get(field, inspect.Parameter.empty)
            kind = inspect.Parameter.KEYWORD_ONLY
            flat.append(inspect.Parameter(field, kind, default=default, annotation=hints[field]))

    @functools.wraps(command)
    def with_fields(**given: Any) -> None:
        made = {
            name: group(**{field: given.pop(field) for field in group._fields})
            for name, group in groups.items()
        }
        command(**made, **given)

    # Typer reads both.
    vars(with_fields)["__signature__"] = inspect.Signature(flat)
    with_fields.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return with_fields
