"""vLLM's OpenAI server and its command-line arguments, adapted to each release of vLLM."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any


def serve_parser(parser: Any) -> Any:
    """Adds the arguments of `vllm serve` to a FlexibleArgumentParser."""
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # up to 0.32
        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ImportError:  # up to 0.31
            from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser(parser)


def known_arguments(parser: Any) -> set[str]:
    """Returns the names of all options of the parser, without leading dashes."""
    return {name.lstrip("-") for name in parser._option_string_actions}


def hold_tools_to_schemas(parser: Any) -> None:
    """Makes vLLM constrain the arguments of a required or named tool to its schema, as up to 0.28.
    Release 0.32 constrains only `strict` tools: models answered with arguments such as [].
    """
    if "tool-strict-level" in known_arguments(parser):
        parser.set_defaults(tool_strict_level="parameter")


async def openai_app(llm: Any, args: Any) -> Any:
    """Builds vLLM's OpenAI application (ASGI) around a running engine."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # up to 0.31
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app


# (path, request, arguments of the route's function); raises the error of a bad body.
Check = Callable[[str, Any, Iterable[Any]], Awaitable[None]]


def check_bodies(app: Any, check: Check) -> None:
    """Calls `check` with each parsed request body before the route's function runs."""
    for route in app.routes:
        dependant = getattr(route, "dependant", None)
        if dependant is not None and inspect.iscoroutinefunction(inspect.unwrap(dependant.call)):
            dependant.call = _after_check(route.path, dependant, check)


def _after_check(path: str, dependant: Any, check: Check) -> Any:
    call = dependant.call

    @functools.wraps(call)
    async def checked(**values: Any) -> Any:
        for value in values.values():
            _replace_null(value)
        await check(path, values.get(dependant.request_param_name), values.values())
        return await call(**values)

    return checked


def _replace_null(request: Any) -> None:
    """Replaces null by the default in fields that vLLM copies to its answer on /v1/responses. The
    answer allows no null in these fields, so vLLM would fail to create the answer.
    """
    fields = getattr(type(request), "model_fields", {})
    for name in ("background", "truncation"):
        if name in fields and getattr(request, name) is None:
            setattr(request, name, fields[name].default)


def routes(app: Any) -> list[tuple[str, str]]:
    """Returns (method, path) of all routes of an application. Mounted applications are excluded."""
    return [
        (method, route.path)
        for route in app.routes
        for method in getattr(route, "methods", None) or ()
    ]
