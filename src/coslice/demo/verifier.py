"""A verifier service: checks answers, a limited number of them per second, in a process of its own.

It stands for a code sandbox or a judge model: what limits it is not our CPU, so it *sleeps* while an
answer's share of its rate has not come up. Started by the demo (``python -m coslice.demo.verifier --rate
300``); says its port on standard output and ends when standard input does, so that it never outlives who
started it. It knows nothing of accelerators or of coslice.
"""

import argparse
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from coslice.demo.task import TASKS, score


class RateLimit:
    """``rate`` answers a second, one after another, without saving up while idle. Thread-safe."""

    def __init__(self, rate: float) -> None:
        self._seconds_each = 1 / rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, answers: int, *, now: float) -> float:
        """The moment at which this many answers are checked, if they come in ``now``."""
        with self._lock:
            self._free_at = max(self._free_at, now) + answers * self._seconds_each
            return self._free_at


class Verifier(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.limit = RateLimit(rate)


class _Handler(BaseHTTPRequestHandler):
    server: Verifier

    def do_POST(self) -> None:
        ready_at = time.monotonic()
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ready_at = self.server.limit.reserve(len(asked["items"]), now=ready_at)
            rewards = [score(asked["task"], question, answer) for question, answer in asked["items"]]
        except (KeyError, TypeError, ValueError) as error:
            self._answer(400, {"error": f"malformed request: {error!r}; known tasks: {', '.join(TASKS)}"})
            return
        time.sleep(max(0.0, ready_at - time.monotonic()))
        self._answer(200, {"rewards": rewards})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: the demo's progress is drawn on the same terminal."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, required=True, help="answers checked per second")
    verifier = Verifier(parser.parse_args().rate)
    threading.Thread(target=verifier.serve_forever, daemon=True).start()
    print(json.dumps({"port": verifier.server_address[1]}), flush=True)
    sys.stdin.read()
    verifier.shutdown()


if __name__ == "__main__":
    main()
