"""The live cluster of the soak: one orchestrator, agents and jobs, each its own process, all of them ours.

One thread, and no gRPC: jobs are forked from here, with torch loaded already, and neither survives a fork.
Every child has a session of its own and dies with us, however we end (prctl(2), PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from soak import trouble
from soak.job import Spec, live

MIB = 1 << 20
DEVICE = 128 * MIB
HOST = 512 * MIB
SERVE = Path(__file__).parents[1] / "faults" / "serve.py"
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
BOUND = 60.0
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("COSLICE_")}


class Gone(Exception):
    """A part of the cluster ended by itself, which none may."""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses: dict[str, str] = {}
        self.pids: dict[str, int] = {}
        self.nodes: dict[str, str] = {}
        """Each with its group."""
        self.groups: dict[str, str] = {}
        """Of each job."""
        self.rows: dict[str, int] = {}
        self._starts = 0

    def populate(self, *, groups: int, jobs: int, rows: list[int]) -> None:
        """A node to each group, with a device that holds one job's state and hardly two."""
        for name in ("records", "checkpoints", "witness"):
            (self.folder / name).mkdir()
        self.start("orchestrator")
        for number in range(1, groups + 1):
            self.nodes[f"n{number}"] = f"pool-{number}"
            self.start(f"n{number}")
        for number in range(jobs):
            job = f"job-{number + 1:02}"
            self.groups[job] = f"pool-{number % groups + 1}"
            self.rows[job] = rows[number // groups % len(rows)]
            self.start(job)

    def spec(self, job: str) -> Spec:
        node = self.groups[job].replace("pool-", "n")
        return Spec(
            job=job,
            group=self.groups[job],
            orchestrator=self.addresses["orchestrator"],
            agent=self.addresses[node],
            folder=str(self.folder),
            rows=self.rows[job],
        )

    # ── starting ───────────────────────────────────────────────────────────

    def start(self, name: str) -> None:
        self._starts += 1
        if name in self.groups:
            spec, incarnation = self.spec(name), f"{name}-{self._starts}"
            self.pids[name] = self._fork(name, lambda: live(spec, incarnation))
        elif name in self.nodes:
            self._serve(name, "agent", self._agent(name))
        else:
            self._serve(name, "orchestrator", self._orchestrator())

    def _orchestrator(self) -> dict[str, object]:
        return {
            "listen": self.addresses.get("orchestrator", "127.0.0.1:0"),
            "store": str(self.folder / "orchestrator.db"),
            "session_grace": trouble.SESSION_GRACE,
            "keepalive": trouble.KEEPALIVE,
        }

    def _agent(self, node: str) -> dict[str, object]:
        return {
            "node": node,
            "orchestrator": self.addresses["orchestrator"],
            "listen": self.addresses.get(node, "127.0.0.1:0"),
            "groups": [{"group": self.nodes[node], "device_budget": DEVICE}],
            "host_budget": HOST,
            "state_dir": str(self.folder / node),
            "runtime_dir": str(self.folder / node / "run"),
            "move_timeout": trouble.MOVE_TIMEOUT,
            "section_wait": trouble.SECTION_WAIT,
            "retries": trouble.RETRIES,
            "stuck_grace": trouble.STUCK_GRACE,
        }

    def _serve(self, name: str, kind: str, settings: dict[str, object]) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, str(SERVE), kind, json.dumps(settings)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=ENVIRONMENT,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        self.pids[name] = process.pid
        assert process.stdout is not None
        with process.stdout as lines:
            said = lines.readline() if select.select([lines], [], [], BOUND)[0] else ""
        if not said:
            raise Gone(f"{name} did not start: {self.last_words(name)}")
        self.addresses[name] = str(json.loads(said)[kind])
        process.returncode = 0  # it is waited for by pid, with all others

    def _fork(self, name: str, work: Callable[[], int]) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _in_child(parent, self.folder / f"{name}.log", work)
        return pid

    # ── striking ───────────────────────────────────────────────────────────

    def signal(self, name: str, number: int) -> None:
        """Nothing if it has ended, which the next look at the dead tells."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[name], number)

    def reap(self) -> list[tuple[str, int]]:
        """Who has ended since the last look, with the exit status (negative: the signal)."""
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            name = next((name for name, known in self.pids.items() if known == pid), None)
            if name is not None:
                del self.pids[name]
                ended.append((name, os.waitstatus_to_exitcode(status)))

    def last_words(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text()[-1500:] if log.exists() else "it left no log"

    def close(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + BOUND
        while self.pids and time.monotonic() < deadline:
            self.reap()
            signal.sigtimedwait({signal.SIGCHLD}, 1.0)


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _in_child(parent: int, log: Path, work: Callable[[], int]) -> NoReturn:
    status = 70
    try:
        os.setsid()
        _die_with(parent)()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        words = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(words, 1)
        os.dup2(words, 2)
        status = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
