"""What one viewer of the dashboard has still to be sent. Pure: no clock, no socket.

Messages carry numbers that grow by one. A viewer that reads too slowly costs a bounded amount of memory: what
lies here is dropped, and it is given a fresh snapshot instead when it reads again.
"""

from collections import deque

MAX_MESSAGES = 400
MAX_BYTES = 4 << 20


class Mailbox:
    def __init__(self, max_messages: int = MAX_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._messages: deque[bytes] = deque()
        self.bytes = 0
        self.behind = True
        """Only a snapshot helps. True from the start: nobody knows anything yet."""

    def put(self, message: bytes) -> None:
        if self.behind:  # the snapshot will tell
            return
        self._messages.append(message)
        self.bytes += len(message)
        if len(self._messages) > self._max_messages or self.bytes > self._max_bytes:
            self._messages.clear()
            self.bytes = 0
            self.behind = True

    def caught_up(self) -> None:
        """A snapshot of now is sent next."""
        self.behind = False

    def take(self) -> bytes:
        """Everything that lies here, in its order; empty: nothing."""
        everything = b"".join(self._messages)
        self._messages.clear()
        self.bytes = 0
        return everything

    def __bool__(self) -> bool:
        return self.behind or bool(self._messages)
