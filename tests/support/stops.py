"""A stop flag that sets itself, to cancel work in the middle."""

import threading


class StopAtLook(threading.Event):
    """A flag that counts as set from the `number`-th time that it is checked."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.looks = number, 0

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks >= self.number
