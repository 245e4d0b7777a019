"""Describes what happened to workers since the supervisor's last look."""

from collections.abc import Iterator, Sequence

from poc_core.serving.places import WorkerPlace


def happenings(
    before: Sequence[WorkerPlace], now: Sequence[WorkerPlace]
) -> Iterator[tuple[str, str]]:
    """Each worker that ended, was given up or got ready: its name, and what happened to it."""
    earlier = {place.name: place for place in before}
    for place in now:
        was = earlier.get(place.name)
        ended_at = was.last_exit_at if was is not None else None
        if place.last_exit_at != ended_at:
            then = place.gave_up or f"{place.name} ended ({place.last_exit}); it is started again."
            yield place.name, then
        was_ready = was is not None and was.is_ready and place.last_exit_at == ended_at
        if place.is_ready and not was_ready:
            again = ""
            if place.last_exit_at is not None:
                again = f" again, {place.since - place.last_exit_at:.0f} s after its end"
            yield place.name, f"{place.name} is ready{again}."
