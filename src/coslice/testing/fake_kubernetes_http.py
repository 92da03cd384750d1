"""``Cluster`` over HTTP, on a port of this machine: in a thread (``FakeKubernetes``) or as a process::

    python -m coslice.testing.fake_kubernetes_http [--port N]      # prints its URL

Trouble on demand: ``fail`` makes requests fail, ``lose`` does them and loses the answer, ``go_down``.
"""

import argparse
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from coslice.testing.fake_kubernetes import ApiError, Cluster, Object, Where, dumps


class FakeKubernetes:
    """``with FakeKubernetes() as api:`` serves ``api.cluster`` at ``api.url``."""

    def __init__(self, cluster: Cluster | None = None, *, port: int = 0) -> None:
        self.cluster = cluster or Cluster()
        self.fail: Callable[[str, str], ApiError | None] = lambda method, path: None
        """Asked before each request is done."""
        self.lose: Callable[[str, str], bool] = lambda method, path: False
        """Asked after: True breaks the connection instead of answering."""
        self.down = False
        self.bookmark_s = 1.0
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = _Server(("127.0.0.1", port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeKubernetes":
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # client and server share an interpreter and take turns with each request
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.drop_watches()
        self._server.shutdown()
        self._server.break_all()
        self._server.server_close()
        sys.setswitchinterval(self._switch)

    def go_down(self) -> None:
        """Until ``down`` is False again nobody is answered; what is open breaks."""
        self.down = True
        self.cluster.drop_watches()
        self._server.break_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is nothing to tell."""

    def break_all(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    api: FakeKubernetes

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body: Object = json.loads(self.rfile.read(length)) if length else {}
        if self.api.down:
            self.close_connection = True
            return
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        try:
            if (failure := self.api.fail(self.command, parts.path)) is not None:
                raise failure
            where, name = _where(parts.path)
            if self.command == "GET" and query.get("watch") in ("true", "1"):
                self._watch(where, query)
                return
            code, answer = self._do(where, name, query, body)
        except ApiError as error:
            code, answer = error.code, error.status()
        if self.api.lose(self.command, parts.path):
            self.close_connection = True
            return
        data = dumps(answer)
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _do(self, where: Where, name: str, query: dict[str, str], body: Object) -> tuple[int, Object]:
        cluster = self.api.cluster
        match self.command:
            case "GET" if name:
                return 200, cluster.get(where, name)
            case "GET":
                return 200, _page(cluster, where, query)
            case "POST":
                return 201, cluster.create(where, body)
            case "PUT":
                return 200, cluster.replace(where, name, body)
            case "PATCH":
                return 200, cluster.patch(where, name, body)
            case "DELETE":
                return 200, cluster.delete(where, name, body.get("preconditions"))
            case _:
                raise ApiError(405, "MethodNotAllowed", self.command)

    def _watch(self, where: Where, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        events = self.api.cluster.watch(
            where,
            query.get("resourceVersion", ""),
            labels=query.get("labelSelector", ""),
            fields=query.get("fieldSelector", ""),
            bookmarks=query.get("allowWatchBookmarks") in ("true", "1"),
            bookmark_s=self.api.bookmark_s,
            timeout_s=float(query.get("timeoutSeconds", 300)),
        )
        for event in events:
            line = dumps(event) + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


def _page(cluster: Cluster, where: Where, query: dict[str, str]) -> Object:
    """``continue`` tokens say the version of the list and where it goes on; one from before a compaction is
    too old."""
    things, version = cluster.list(where, query.get("labelSelector", ""), query.get("fieldSelector", ""))
    start, of = 0, version
    if token := query.get("continue", ""):
        of, start = (int(part) for part in token.split("."))
        if of < cluster._compacted:
            raise ApiError(410, "Expired", "The provided continue parameter is too old")
    limit = int(query.get("limit", 0)) or len(things)
    meta: Object = {"resourceVersion": str(of)}
    if start + limit < len(things):
        meta["continue"] = f"{of}.{start + limit}"
    return {"kind": "List", "apiVersion": "v1", "metadata": meta, "items": things[start : start + limit]}


def _where(path: str) -> tuple[Where, str]:
    """``/api/v1/…`` or ``/apis/GROUP/VERSION/…``, then ``[namespaces/NS/]PLURAL[/NAME]``."""
    steps = path.strip("/").split("/")
    if steps[0] == "api" and len(steps) > 2:
        group, rest = steps[1], steps[2:]
    elif steps[0] == "apis" and len(steps) > 3:
        group, rest = "/".join(steps[1:3]), steps[3:]
    else:
        raise ApiError(404, "NotFound", f"no resource at {path}")
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    return (group, rest[0], namespace), rest[1] if len(rest) > 1 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    with FakeKubernetes(port=parser.parse_args().port) as api:
        print(json.dumps({"url": api.url}), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
