"""A fake vLLM server: the development routes of ``VLLM_SERVER_DEV_MODE=1 vllm serve --enable-sleep-mode``.

Silent by nature, as reported of the real one: ``/sleep`` twice changes nothing and answers 200; ``/wake_up``
with a tag that does not sleep wakes nothing and answers 200; ``/is_sleeping`` is true while only paused;
``/sleep`` with requests in flight answers 200 and the engine dies; a forward pass after a partial wake kills
it; after level 2 the weights are garbage until they are loaded again; ``/health`` is green on a wedged
engine.

Faults: ``frees-nothing`` ``frees-little`` ``frees-late`` ``dies-asleep`` ``sleep-500`` ``sleep-hangs``
``sleep-slow`` ``exits-on-sleep`` ``wake-500`` ``wake-noop`` ``wake-exits`` ``wake-hangs`` ``wake-slow``
``gibberish`` ``completions-hang`` ``pause-noop`` ``wait-invalid``.
"""

import argparse
import os
from typing import Any

from coslice.testing.engines.server import Engine, Query, Reply, serve


class Vllm(Engine):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.version = options.version
        dev = {
            "POST /sleep": self.sleep,
            "POST /wake_up": self.wake_up,
            "GET /is_sleeping": self.is_sleeping,
            "POST /pause": self.pause,
            "POST /resume": self.resume,
            "GET /is_paused": lambda q, b: (200, {"is_paused": self.paused}),
            "POST /collective_rpc": self.collective_rpc,
            "POST /reset_prefix_cache": lambda q, b: (200, None),
            "POST /reset_mm_cache": lambda q, b: (200, None),
            "POST /weight_checker": self.weight_checker,
        }
        self.routes |= {
            "GET /version": lambda q, b: (200, {"version": self.version}),
            "GET /metrics": lambda q, b: (200, self.metrics()),
        }
        if not options.no_dev_mode:
            self.routes |= dev

    def metrics(self) -> str:
        return (
            f'vllm:num_requests_running{{model_name="fake",engine="0"}} {self.inflight}.0\n'
            'vllm:num_requests_waiting{model_name="fake",engine="0"} 0.0\n'
        )

    def is_sleeping(self, query: Query, body: Any) -> Reply:
        with self.changed:
            self.core()
            return 200, {"is_sleeping": bool(self.asleep) or self.paused}

    def pause(self, query: Query, body: Any) -> Reply:
        mode = query.get("mode", ["abort"])[0]
        with self.changed:
            if mode == "wait" and self.has("wait-invalid"):
                return 400, {"error": "wait mode is not supported with an in-process engine"}
            if mode == "wait":
                self.changed.wait_for(lambda: self.inflight == 0)
            if mode == "abort":
                self.inflight = 0
            self.paused = not self.has("pause-noop")
        return 200, {"status": "paused"}

    def resume(self, query: Query, body: Any) -> Reply:
        with self.changed:
            self.paused = False
            self.changed.notify_all()
        return 200, {"status": "resumed"}

    def sleep(self, query: Query, body: Any) -> Reply:
        level = int(query.get("level", ["1"])[0])
        with self.changed:
            if self.has("sleep-hangs"):
                self.hang()
            self.slow("sleep-slow")
            if self.has("exits-on-sleep"):
                os._exit(1)
            if self.once("sleep-500"):
                return 500, {"detail": "Internal Server Error"}
            if (self.inflight and not self.paused) or self.has("dies-asleep"):
                self.die()
                return 200, None
            if self.asleep or level == 0:
                return 200, None
            self.asleep = {"weights", "kv_cache"}
            self.free([(self.weights, level == 1), (self.kv, False)])
        return 200, None

    def wake_up(self, query: Query, body: Any) -> Reply:
        tags = set(query.get("tags", [])) or {"weights", "kv_cache"}
        with self.changed:
            if self.has("wake-hangs"):
                self.hang()
            self.slow("wake-slow")
            if self.has("wake-exits"):
                os._exit(1)
            if self.has("wake-500"):
                self.wedged = True
                return 500, {"detail": "list has no zero_"}
            if not self.asleep or not tags <= self.asleep or self.has("wake-noop"):
                return 200, None
            self.asleep -= tags
            if "weights" in tags:
                self.weights.resume(garbage=5 if self.has("gibberish") else None)
            if "kv_cache" in tags:
                self.kv.resume()
            if not self.asleep:
                self.paused = False
                self.changed.notify_all()
        return 200, None

    def collective_rpc(self, query: Query, body: Any) -> Reply:
        if body.get("method") == "reload_weights" and self.weights.pages is not None:
            self.weights.fill(self.weights.seed)
        return 200, {"results": [None]}

    def weight_checker(self, query: Query, body: Any) -> Reply:
        if self.paused or self.asleep:
            return 409, {"error": "paused or asleep"}
        now = {"model.weight": f"{self.weights.digest():08x}"}
        if body["action"] == "checksum":
            return 200, now
        wrong = [name for name, digest in body["baseline"].items() if now.get(name) != digest]
        return 200, {"match": not wrong, "mismatches": wrong}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", default="0.17.1")
    parser.add_argument("--no-dev-mode", action="store_true")
    parser.add_argument("--redirect", action="append", default=[], help="a route that answers elsewhere")


if __name__ == "__main__":
    serve(Vllm, add)
