"""Reads the node's health from Redis, and formats it for the API's answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from api.health.judgement import Health, Snapshot, judge, replacement
from api.health.redis_watch import RedisWatch
from poc_core.redis_at.connections import is_transient
from poc_core.settings import Settings
from poc_core.state.overview import Overview, Overviews


@dataclass(frozen=True)
class HealthReader:
    """Derives the node's health from Redis. Works also while Redis does not answer."""

    _overviews: Overviews
    watch: RedisWatch
    _settings: Settings
    now: Callable[[], float]  # seconds since the epoch

    def read(self) -> tuple[Health, Overview | None]:
        """Returns the node's health, and the Overview behind it (None if Redis does not answer)."""
        if self.watch.is_mute:  # asking Redis would take seconds
            return self.of(None), None
        try:
            seen = self._overviews.read()
        except Exception as error:
            if not is_transient(error):
                raise
            self.watch.note_away(error)
            return self.of(None), None
        return self.of(seen), seen

    def of(self, seen: Overview | None) -> Health:
        """Derives the node's health from `seen`, which is None while Redis does not answer."""
        if seen is not None:
            self.watch.note_back()
        return judge(
            Snapshot(
                self.now(),
                seen,
                self.watch.away_since,
                self.watch.trouble,
                self._settings.worker_ttl_s,
                self._settings.outbox_max_bytes,
            )
        )

    def replacement(self, seen: Overview) -> str | None:
        return replacement(seen, self.of(seen).seats, self.now())

    def answer(self, health: Health) -> dict[str, Any]:
        now = self.now()
        return {
            "level": health.level,
            "since": health.since,
            "workers": len(health.seats),
            "workers_ready": health.n_ready,
            "reasons": [vars(reason) | {"text": reason.text(now)} for reason in health.reasons],
        }
