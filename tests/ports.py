"""Ports of servers that tests start again at the same place."""

import socket


class Kept:
    """A port that is nobody else's while no server is on it, for as long as this object is there.

    It is bound, and nobody listens: whoever connects is refused, the system gives it to no other socket, and
    a server that sets SO_REUSEADDR (as all of ours do) may listen on it all the same (socket(7)).
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __del__(self) -> None:
        self._socket.close()
