"""The agent's unix socket as a workload sees it: who answers there, and the ticket for a registration.

The agent serves processes of its own user. So does the workload in turn trust nobody else: whoever listens on
the agent's port could be anybody on this machine, but who made the socket the kernel says.
"""

import json
import os
import socket
import struct

from coslice.errors import Denied, OperationFailed

_SECONDS = 10.0


def connect(path: str, seconds: float) -> socket.socket:
    """A connection to the agent, which runs as our user or as root. Raises ``OSError`` or ``Denied``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(path)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid not in (0, os.geteuid()):
            raise Denied(
                f"the agent at {path} is run by user {uid}, and this process by user {os.geteuid()}: its "
                "state is not handed to somebody else. Start the agent as the same user"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def fetch(path: str) -> str:
    """A ticket: the agent's word that it knows which process this is. Raises ``CosliceError``."""
    try:
        with connect(path, _SECONDS) as connection:
            connection.sendall(b'{"ticket": true}\n')
            data = b""
            while not data.endswith(b"\n") and len(data) < 65536:
                part = connection.recv(4096)
                if not part:
                    break
                data += part
        answer = json.loads(data)
    except FileNotFoundError as error:
        raise Denied(
            f"the agent's socket {path} is not here: this process is in another container or on another "
            "node. Mount the agent's runtime folder into it (at the same path, or say where with "
            "COSLICE_AGENT_SOCKET), or name this node's own agent with COSLICE_AGENT"
        ) from error
    except (OSError, ValueError) as error:
        raise OperationFailed(
            f"the agent's socket {path} gave no ticket ({error}): is it running?"
        ) from error
    if not isinstance(answer, dict) or not answer.get("ok"):
        message = answer.get("message", "refused without a reason") if isinstance(answer, dict) else "?"
        raise Denied(f"the agent gives this process no ticket: {message}")
    return str(answer.get("ticket", ""))
