"""Starts a fake engine as a process and talks to its back door."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

PATIENCE = 30.0


class FakeEngine:
    """A running fake; ``with`` ends its process. ``kind``: ``vllm`` or ``sglang``."""

    def __init__(
        self,
        kind: str,
        *flags: str,
        weights: int = 48 << 20,
        kv: int = 16 << 20,
        faults: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", f"coslice.testing.engines.{kind}"]
        command += ["--weights", str(weights), "--kv", str(kv), *flags]
        command += [part for fault in faults for part in ("--fault", fault)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=None if env is None else dict(env), text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fake {kind} ended with {self._process.wait()} before it served")
        self.url: str = json.loads(line)["url"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def state(self) -> dict[str, Any]:
        """``calls``, ``asleep``, ``paused``, ``dead``, ``inflight``."""
        return dict(self._ask("GET", "/_fake"))

    def calls(self) -> list[str]:
        """``METHOD path?query body`` of everything that was asked, in order."""
        return list(self.state()["calls"])

    def fault(self, *faults: str) -> None:
        """Replace the faults that are on."""
        self._ask("POST", "/_fake", {"faults": list(faults)})

    def hold(self, count: int) -> None:
        """Pretend that so many requests are being generated; 0: they have ended."""
        self._ask("POST", "/_fake", {"inflight": count})

    def generate(self, prompt: str = "hello") -> str:
        body = {"model": "fake", "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 5}
        return str(self._ask("POST", "/v1/completions", body)["choices"][0]["text"])

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        import urllib.request  # not needed by the server process, which imports this package too

        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
