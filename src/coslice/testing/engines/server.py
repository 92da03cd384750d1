"""What the fake engines share: memory, a model that is a digest of it, HTTP, and the back door ``/_fake``."""

import argparse
import json
import mmap
import os
import threading
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from coslice.tied import tie

PAGE = 4096
Query = dict[str, list[str]]
Reply = tuple[int, object]


class Region:
    """A piece of "device memory": anonymous pages. Its host copy is a memory file, which does not count."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.pages: mmap.mmap | None = None
        self._backup: mmap.mmap | None = None
        self._released = False
        self.fill(seed)

    def fill(self, seed: int) -> None:
        pages = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        piece = bytes((seed + i) % 251 for i in range(PAGE)) * 64
        for at in range(0, self.size, len(piece)):
            pages[at : at + len(piece)] = piece[: min(len(piece), self.size - at)]
        self.pages = pages

    def release(self, *, keep: bool, share: float = 1.0) -> None:
        """Give the pages back (the first ``share`` of them, at that); ``keep`` a copy on the host."""
        assert self.pages is not None
        if keep:
            fd = os.memfd_create("fake-engine", os.MFD_CLOEXEC)
            os.ftruncate(fd, self.size)
            self._backup = mmap.mmap(fd, self.size)
            os.close(fd)
            copy(self.pages, self._backup)
        self._released = True
        if share >= 1.0:
            self.pages.close()
            self.pages = None
        else:
            self.pages.madvise(mmap.MADV_DONTNEED, 0, int(self.size * share) // PAGE * PAGE)

    def resume(self, *, garbage: int | None = None) -> None:
        """Pages again: from the copy if there is one, otherwise ``garbage``."""
        if not self._released:  # it only said so
            return
        self._released = False
        if self.pages is not None:
            self.pages.close()
        if self._backup is not None and garbage is None:
            self.fill(self.seed)
            assert self.pages is not None
            copy(self._backup, self.pages)
        else:
            self.fill((self.seed + (77 if garbage is None else garbage)) % 251)
        if self._backup is not None:
            self._backup.close()
            self._backup = None

    def digest(self) -> int:
        assert self.pages is not None
        return zlib.crc32(self.pages[::PAGE])


def copy(source: mmap.mmap, target: mmap.mmap) -> None:
    """Without a copy in between, which malloc would keep: it would count as device memory."""
    with memoryview(source) as here, memoryview(target) as there:
        there[:] = here


class Engine:
    """State, faults and routes. ``routes`` maps ``METHOD /path`` to ``(query, body) -> (status, answer)``."""

    model = "fake"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.changed = threading.Condition(threading.RLock())
        self.weights, self.kv = Region(options.weights, 3), Region(options.kv, 9)
        self.faults: set[str] = set(options.fault)
        self.without: set[str] = set(options.without)
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        self.paused = self.dead = self.wedged = self.busy = False
        self.inflight = 0
        self.routes: dict[str, Callable[[Query, Any], Reply]] = {
            "GET /v1/models": lambda q, b: (200, {"data": [{"id": self.model, "object": "model"}]}),
            "GET /health": lambda q, b: (503, {}) if self.dead else (200, {}),
            "POST /v1/completions": self.completions,
        }

    # ── faults ─────────────────────────────────────────────────────────────

    def has(self, fault: str) -> bool:
        return fault in self.faults

    def once(self, fault: str) -> bool:
        """True the first time, if this fault is on."""
        if fault in self.faults:
            self.faults.discard(fault)
            return True
        return False

    def backdoor(self, body: dict[str, Any]) -> Reply:
        with self.changed:
            if "faults" in body:
                self.faults = set(body["faults"])
            self.inflight = body.get("inflight", self.inflight)
            self.changed.notify_all()
        return 200, {}

    def state(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "asleep": sorted(self.asleep),
            "paused": self.paused,
            "dead": self.dead,
            "inflight": self.inflight,
            "faults": sorted(self.faults),
        }

    def die(self) -> None:
        """As an engine core does: its memory is gone, the HTTP server answers on."""
        self.dead = True
        for region in (self.weights, self.kv):
            if region.pages is not None:
                region.pages.close()
                region.pages = None

    # ── generation ─────────────────────────────────────────────────────────

    def completions(self, query: Query, body: Any) -> Reply:
        with self.changed:
            if self.has("completions-hang") or self.wedged:
                self.hang()
            self.core()
            if self.asleep and not self.paused:
                self.die()  # a kernel ran on unmapped pages
            if self.dead:
                return 500, {"error": "EngineDeadError"}
            self.changed.wait_for(lambda: not self.paused or self.dead)
            if self.weights.pages is None:  # dead meanwhile
                return 500, {"error": "EngineDeadError"}
            seed = zlib.crc32(str(body.get("prompt", "")).encode(), self.weights.digest())
        words = [f"w{(seed >> shift) & 0xFF}" for shift in range(0, 32, 8)]
        noise = 0.01 * (len(self.calls) % 3)  # no two runs of a real engine agree to the last bit
        top = {word: -0.5 * (i + 1) - noise for i, word in enumerate(words)}
        count = int(body.get("max_tokens", 4))
        choice = {
            "text": " ".join(words[:count]),
            "finish_reason": "length",
            "logprobs": {"tokens": words[:count], "top_logprobs": [top] * count},
        }
        return 200, {"model": self.model, "choices": [choice]}

    def core(self) -> None:
        """What goes through the engine's core waits for its turn there. Call it with the lock held."""
        self.changed.wait_for(lambda: not self.busy)

    def slow(self, fault: str) -> None:
        """While this fault is on, the core is busy with the task at hand."""
        self.busy = self.has(fault)
        self.changed.wait_for(lambda: not self.has(fault))
        self.busy = False
        self.changed.notify_all()

    def hang(self) -> None:
        self.changed.wait_for(lambda: False)

    def free(self, regions: list[tuple[Region, bool]]) -> None:
        """Release regions (and keep a copy on the host or not), as well as the faults let it."""
        if self.has("frees-nothing"):
            return
        share = 0.3 if self.has("frees-little") else 1.0
        if self.has("frees-late"):
            threading.Timer(0.4, self._free, (regions, 1.0)).start()
            return
        self._free(regions, share)

    @staticmethod
    def _free(regions: list[tuple[Region, bool]], share: float) -> None:
        for region, keep in regions:
            region.release(keep=keep, share=share)


def serve(
    make: Callable[[argparse.Namespace], Engine], add: Callable[[argparse.ArgumentParser], None]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--weights", type=int, default=48 << 20, help="bytes")
    parser.add_argument("--kv", type=int, default=16 << 20, help="bytes")
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--without", action="append", default=[], help="a route that this build has not")
    add(parser)
    options = parser.parse_args()
    tie(os.getppid())  # it must not outlive its test
    engine = make(options)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), _handler(engine))
    server.daemon_threads = True
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_address[1]}"}), flush=True)
    server.serve_forever()


def _handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer("GET")

        def do_POST(self) -> None:
            self.answer("POST")

        def answer(self, method: str) -> None:
            url = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                body = json.loads(raw) if raw else None
            except ValueError:
                body = None
            if url.path == "/_fake":
                self.reply(engine.backdoor(body or {}) if method == "POST" else (200, engine.state()))
                return
            engine.calls.append(f"{method} {self.path} {raw.decode()}".strip())
            route = engine.routes.get(f"{method} {url.path}")
            if route is None or url.path in engine.without:
                self.reply((404, {"detail": "Not Found"}))
                return
            if url.path in engine.options.redirect:
                self.send_response(307)
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.reply(route(parse_qs(url.query), body))

        def reply(self, reply: Reply) -> None:
            status, answer = reply
            data = b"" if answer is None else json.dumps(answer).encode()
            if isinstance(answer, str):
                data = answer.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
