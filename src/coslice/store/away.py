"""What a log says of a store that does not answer: when that begins, now and then, and when it is over."""

import logging
import time

AGAIN_S = 60.0

log = logging.getLogger(__name__)


class Away:
    def __init__(self) -> None:
        self._since = self._said = 0.0

    def says(self, error: Exception) -> None:
        """It did not answer, once more."""
        now = time.monotonic()
        self._since = self._since or now
        if not self._said or now - self._said >= AGAIN_S:
            self._said = now
            log.warning("nobody can be elected yet, for %.0f s now: %s", now - self._since, error)

    def answers(self) -> None:
        if self._since:
            log.warning("the store answers again, after %.0f s", time.monotonic() - self._since)
        self._since = self._said = 0.0
