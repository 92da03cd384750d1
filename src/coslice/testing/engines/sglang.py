"""A fake SGLang server, as ``--enable-memory-saver --enable-weights-cpu-backup`` starts it.

Silent or deadly by nature, as reported of the real one: without ``--enable-memory-saver`` a release answers
200 and frees nothing; without ``--enable-weights-cpu-backup`` the weights come back as garbage; a release
with requests, or a resume of what was not released, kills the scheduler; a request to released memory kills
it too; there is no route that tells what is released.

Faults: ``frees-nothing`` ``frees-little`` ``frees-late`` ``release-502-done`` ``release-502-undone``
``release-hangs`` ``dies-asleep`` ``resume-exits`` ``resume-hangs`` ``gibberish`` ``completions-hang``.
"""

import argparse
import os
from typing import Any

from coslice.testing.engines.server import Engine, Query, Reply, serve

TAGS = ("weights", "kv_cache")


class Sglang(Engine):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.routes |= {
            "GET /get_server_info": self.server_info,
            "GET /get_load": self.load,
            "GET /metrics": lambda q, b: (200, f"sglang:num_running_reqs{{}} {self.inflight}.0\n"),
            "POST /release_memory_occupation": self.release,
            "POST /resume_memory_occupation": self.resume,
            "POST /pause_generation": self.pause,
            "POST /continue_generation": self.go_on,
            "POST /flush_cache": lambda q, b: (200, "Cache flushed."),
        }

    def load(self, query: Query, body: Any) -> Reply:
        with self.changed:
            self.core()
            return (500, {}) if self.dead else (200, [{"dp_rank": 0, "num_reqs": self.inflight}])

    def server_info(self, query: Query, body: Any) -> Reply:
        if self.dead:
            return 500, {}
        return 200, {
            "version": self.options.version,
            "enable_memory_saver": not self.options.no_memory_saver,
            "enable_weights_cpu_backup": not self.options.no_weights_backup,
            "nnodes": self.options.nnodes,
        }

    def pause(self, query: Query, body: Any) -> Reply:
        with self.changed:
            if (body or {}).get("mode", "abort") == "abort":
                self.inflight = 0
            self.paused = True
        return 200, {"status": "ok"}

    def go_on(self, query: Query, body: Any) -> Reply:
        with self.changed:
            self.paused = False
            self.changed.notify_all()
        return 200, {"status": "ok"}

    def release(self, query: Query, body: Any) -> Reply:
        if body is None:
            return 422, {"detail": "a body is required"}
        with self.changed:
            if self.has("release-hangs"):
                self.hang()
            if self.has("dies-asleep"):
                self.die()
                return 200, None
            if self.once("release-502-undone"):
                return 502, {}
            if self.dead or self.inflight:
                self.die()
                return 500, {"error": "AssertionError: release with requests"}
            tags = set(body.get("tags") or TAGS)
            if tags & self.asleep:
                self.die()
                return 500, {"error": "exit(1): pausing a paused allocation"}
            if not self.options.no_memory_saver:
                backup = not self.options.no_weights_backup
                wanted = [(self.weights, backup)] if "weights" in tags else []
                wanted += [(self.kv, False)] if "kv_cache" in tags else []
                self.free(wanted)
                self.asleep |= tags
            if self.once("release-502-done"):
                return 502, {}
        return 200, None

    def resume(self, query: Query, body: Any) -> Reply:
        if body is None:
            return 422, {"detail": "a body is required"}
        with self.changed:
            if self.has("resume-hangs"):
                self.hang()
            if self.has("resume-exits"):
                os._exit(1)
            tags = set(body.get("tags") or TAGS)
            if self.options.no_memory_saver:
                return 200, None
            if self.dead or not tags <= self.asleep:
                self.die()
                return 500, {"error": f"KeyError: {sorted(tags - self.asleep)}"}
            self.asleep -= tags
            if "weights" in tags:
                self.weights.resume(garbage=5 if self.has("gibberish") else None)
            if "kv_cache" in tags:
                self.kv.resume()
        return 200, None


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", default="0.5.2")
    parser.add_argument("--no-memory-saver", action="store_true")
    parser.add_argument("--no-weights-backup", action="store_true")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--redirect", action="append", default=[], help="a route that answers elsewhere")


if __name__ == "__main__":
    serve(Sglang, add)
