"""How many commands Redis' scripts call, which other clients wait for."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fakeredis.commands_mixins.scripting_mixin import ScriptingCommandsMixin


@contextmanager
def counted_steps() -> Iterator[Counter[str]]:
    """Within: the commands that scripts call, by name."""
    steps: Counter[str] = Counter()
    call = ScriptingCommandsMixin._lua_redis_call  # noqa: SLF001

    def counted(self: Any, runtime: Any, names: Any, command: bytes, *args: Any) -> Any:
        steps[command.decode().lower()] += 1
        return call(self, runtime, names, command, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptingCommandsMixin, "_lua_redis_call", counted)
        yield steps
