"""Asking again, when a service across a network did not answer or asked for patience."""

import logging
import random
import time

from spile.core.errors import StoreError
from spile.objects.counted import COUNTED

# How long a request is tried again: a service may be gone for minutes, a wrong address stays wrong.
PATIENCE, PATIENCE_AT_FIRST = 300.0, 10.0  # seconds
PASSING = {408, 409, 423, 425, 429}  # of the statuses that put the blame on us
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0

_log = logging.getLogger("spile")


class Trying:
    """Tries of one request: pauses between them grow, are jittered, and end."""

    def __init__(self, what: str, patience: float) -> None:
        self.what, self._patience = what, patience
        self._pause, self._began = _FIRST_PAUSE, time.monotonic()

    def again(self, why: str, error: Exception | None = None, *, at_least: float = 0.0) -> None:
        """Wait before another try.

        Args:
            at_least: seconds that the service asked for; then it is there, and patience is long.

        Raises:
            StoreError: when it has been tried for long enough.
        """
        waited = time.monotonic() - self._began
        if waited > (PATIENCE if at_least else self._patience):
            raise StoreError(
                f"{self.what}: {why} (tried for {waited:.0f} s); check the address and the "
                "network. What is committed stays valid: run the same command again"
            ) from error
        COUNTED.add(retries=1)
        pause = max(at_least, self._pause) * random.uniform(0.5, 1.0) + at_least / 2
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        _log.debug("%s: %s; again in %.1f s", self.what, why, pause)
        time.sleep(pause)
