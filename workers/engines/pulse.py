"""Whether an engine goes on: what it tells of itself, beside whether its processes live."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pulse:
    beats: int = (
        0  # steps that the engine has told of and calls that it has answered, since its start
    )
    waits: bool = False  # somebody waits for it to go on
