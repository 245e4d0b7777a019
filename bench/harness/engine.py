"""The engine of a benchmark, with the options of `proofline bench`."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.harness import machine
from bench.harness.report import say
from cli.engine_options import takes_engine_options
from lab.local_engine import clean_stdout, local_engine
from lab.measure.dimensions import takes_dimensions
from workers.engines.base import Engine
from workers.engines.options import EngineOptions


def takes_engine(
    model: str | None = None, dimensions: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that replaces a parameter `engine_options` by the options of `proofline bench`.

    `model` and `dimensions`: the defaults if the command line names neither.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        taken = takes_dimensions(takes_engine_options(for_proofs=True)(command))

        def with_default(**given: object) -> None:
            if given["model"] is None and given["dimensions"] is None:
                given |= {"model": model, "dimensions": dimensions}
            taken(**given)

        with_default.__doc__ = command.__doc__
        with_default.__annotations__ = taken.__annotations__
        vars(with_default)["__signature__"] = inspect.signature(taken)
        return with_default

    return decorate


@contextmanager
def engine_of(options: EngineOptions) -> Iterator[Engine]:
    """Loads an engine in this process, and prints the machine, the model and the dtype."""
    with clean_stdout(), local_engine(options) as engine:
        say(f"{machine.describe()}; {engine.info.name}, {engine.info.dtype}")
        yield engine
