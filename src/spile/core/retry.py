"""Retries: how long to pause between attempts, and when to give up."""

import logging
from collections.abc import Callable

from spile.core.errors import StoreError
from spile.core.system import system

# How long to retry a request: a service may be down for minutes, but a wrong address stays wrong.
PATIENCE, PATIENCE_AT_FIRST = 300.0, 10.0  # seconds
PASSING = {408, 409, 423, 425, 429}  # 4xx statuses that may be temporary
_FIRST_PAUSE, _LONGEST_PAUSE, _JITTER = 0.1, 15.0, 0.5

_log = logging.getLogger("spile.core")


def backoff(
    failures: int, first: float, longest: float, *, jitter: float = 0.0, at_least: float = 0.0
) -> float:
    """Return the seconds to pause after `failures` failed attempts in a row.

    Args:
        first: the pause after the first failure; each later one is twice as long.
        longest: the longest pause, unless `at_least` is longer.
        jitter: the largest share of the pause that is taken off at random.
        at_least: the shortest pause, whatever the jitter.
    """
    pause = min(longest, first * 2.0 ** min(failures - 1, 60))
    return max(at_least, pause) * system().uniform(1 - jitter, 1) + jitter * at_least


class Retrying:
    """The attempts of one request to a service, with growing, jittered pauses and a time limit."""

    def __init__(self, what: str, patience: float, on_retry: Callable[[], object]) -> None:
        """Args:
        what: the request, as error messages name it.
        patience: seconds after which a failure is final.
        on_retry: called before each pause.
        """
        self.what, self._patience, self._on_retry = what, patience, on_retry
        self._failures, self._began = 0, system().monotonic()

    def again(self, why: str, error: Exception | None = None, *, at_least: float = 0.0) -> None:
        """Pause before another attempt.

        Args:
            at_least: seconds that the service asked for. It is then known to be up, and is retried
                longer.

        Raises:
            StoreError: if the request has been retried for long enough.
        """
        waited = system().monotonic() - self._began
        if waited > (PATIENCE if at_least else self._patience):
            raise StoreError(
                f"{self.what}: {why} (tried for {waited:.0f} s); check the address and the "
                "network. What is committed stays valid: run the same command again"
            ) from error
        self._on_retry()
        self._failures += 1
        pause = backoff(
            self._failures, _FIRST_PAUSE, _LONGEST_PAUSE, jitter=_JITTER, at_least=at_least
        )
        _log.debug("%s: %s; again in %.1f s", self.what, why, pause)
        system().sleep(pause)
