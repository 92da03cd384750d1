"""A real etcd of the test's own: started, killed, stopped and started again on the same ports and data."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
from ports import Kept

BOUND = 60.0


class EtcdServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place, self._peer = Kept(), Kept()
        self.address = self._place.address
        self.process: subprocess.Popen[bytes] | None = None

    def location(self, prefix: str = "test") -> str:
        return f"etcd://{self.address}/{prefix}"

    def start(self) -> "EtcdServer":
        binary = shutil.which("etcd")
        assert binary, "these tests need etcd: apt-get install etcd-server (make test-etcd does)"
        self._folder.mkdir(exist_ok=True)
        client, peer = f"http://{self.address}", f"http://{self._peer.address}"
        flags = ["--name", "t", "--data-dir", str(self._folder / "data"), "--initial-cluster", f"t={peer}"]
        flags += ["--listen-client-urls", client, "--advertise-client-urls", client]
        flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen([binary, *flags], stdout=log, stderr=log)
        self._until_healthy()
        return self

    def _until_healthy(self) -> None:
        deadline = time.monotonic() + BOUND
        while True:  # etcd does not tell its parent when it is ready
            try:
                if httpx.get(f"http://{self.address}/health", timeout=2).json()["health"] == "true":
                    return
            except (httpx.TransportError, ValueError, KeyError):
                pass
            assert self.process is not None
            assert self.process.poll() is None, (self._folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "etcd does not become healthy"
            time.sleep(0.05)  # etcd does not announce that it is healthy

    def call(self, path: str, body: dict[str, object]) -> dict[str, object]:
        answer = httpx.post(f"http://{self.address}/v3/{path}", json=body, timeout=10)
        assert answer.is_success, answer.text
        found: dict[str, object] = answer.json()
        return found

    def pause(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(BOUND)
            self.process = None
