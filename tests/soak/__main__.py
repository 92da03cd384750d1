"""``make soak MINUTES=10``: a live cluster under random kills and stops, and what became of it.

One orchestrator, 4 agents with a device each, 12 jobs with real torch state, three on a device that holds
one. Every few seconds somebody is killed or stopped; jobs begin again from their own last checkpoint, as
real ones do. Then the trouble ends, every job comes to one more turn and tells the digest of its state, which
must be that of an undisturbed run of as many steps. What counts as lost or granted twice: ``verdict``.
Writes ``build/soak.json``; ends with status 1 and keeps the logs if anything was wrong.
"""

import argparse
import contextlib
import heapq
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from soak import trouble, verdict
from soak.job import reference
from soak.live import Cluster, Gone
from soak.trouble import Fault, Kind, Schedule

ROWS = [512, 1024, 1792]
"""Of a job's weights, 4 KiB each; with Adam's state three times that: 6, 12, 21 MiB."""
GROUPS, JOBS = 4, 12
RESTART = (0.2, 2.0)
"""Seconds until a job that ended is started again."""
END = 180.0
"""How long the jobs may take to come to their last turn once nothing disturbs them any more."""
HOPELESS = 10
"""Processes that end without having been struck, before the soak gives up."""
WAKE = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


class Interrupted(Exception):
    pass


class Soak:
    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.schedule = Schedule(seed, jobs=cluster.groups, agents=cluster.nodes)
        self.random = random.Random(seed)
        self.faults: list[Fault] = []
        self.unplanned: list[str] = []
        self.done: set[str] = set()
        self._open: dict[str, Fault] = {}
        """Of each target the fault that is not over yet."""
        self._agenda: list[tuple[float, int, str, str]] = []
        self._count = 0

    def run(self, minutes: float) -> None:
        now = time.monotonic()
        end, told = now + 60 * minutes, now
        self._plan(now + self.schedule.next(), "strike", "")
        while (now := time.monotonic()) < end:
            if now - told >= 30.0:
                told = now
                struck = Counter(fault.kind for fault in self.faults)
                say(f"{end - now:4.0f} s left; so far {sum(struck.values())} faults: {dict(struck)}")
            self._next(min(end, now + 30.0))
        self._calm()

    def _calm(self) -> None:
        """Nothing is struck any more; who is down comes back, and all go home."""
        self._agenda = [entry for entry in self._agenda if entry[2] != "strike"]
        for fault in list(self._open.values()):
            if "stopped" in fault.kind:
                self._go_on(fault.target)
        self._agenda = [entry for entry in self._agenda if entry[2] != "go_on"]
        heapq.heapify(self._agenda)
        say("the trouble is over; every job comes to its last turn")
        (self.cluster.folder / "finish").touch()
        deadline = time.monotonic() + END
        while len(self.done) < len(self.cluster.groups) and time.monotonic() < deadline:
            self._next(deadline)

    def _next(self, until: float) -> None:
        """What is due, or who has ended: whichever comes first, but not after ``until``."""
        due = self._agenda[0][0] if self._agenda else until
        wait = max(0.0, min(due, until) - time.monotonic())
        woken = signal.sigtimedwait(WAKE, wait)
        if woken is not None and woken.si_signo != signal.SIGCHLD:
            raise Interrupted
        for name, status in self.cluster.reap():
            self._ended(name, status)
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            _, _, what, name = heapq.heappop(self._agenda)
            if what == "strike":
                self._strike()
            elif what == "start":
                self._start(name)
            else:
                self._go_on(name)

    def _plan(self, at: float, what: str, name: str) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (at, self._count, what, name))

    # ── trouble ────────────────────────────────────────────────────────────

    def _strike(self) -> None:
        now = time.monotonic()
        self._plan(now + self.schedule.next(), "strike", "")
        drawn = self.schedule.draw(now)
        if drawn is None:
            return
        kind, target = drawn
        for name in (target, "orchestrator") if kind.target == "node" else (target,):
            if name not in self.cluster.pids or name in self._open:
                return
        self._hit(kind, target)

    def _hit(self, kind: Kind, target: str) -> None:
        group = self.cluster.groups.get(target) or self.cluster.nodes.get(target, "")
        now = time.monotonic()
        everybody = kind.target in ("orchestrator", "node")
        fault = Fault(kind=kind.name, target=target, group="" if everybody else group, begun=now)
        self.faults.append(fault)
        for name in (target, "orchestrator") if kind.target == "node" else (target,):
            self._open[name] = fault
            if kind.signal == "kill":
                self.cluster.signal(name, signal.SIGKILL)  # started again when its end is noticed
            else:
                self.cluster.signal(name, signal.SIGSTOP)
                self._plan(now + self.schedule.lasts(kind), "go_on", name)

    def _go_on(self, name: str) -> None:
        fault = self._open.get(name)
        if fault is None or "stopped" not in fault.kind or name not in self.cluster.pids:
            return
        self.cluster.signal(name, signal.SIGCONT)
        fault.ended = time.monotonic()
        del self._open[name]

    def _ended(self, name: str, status: int) -> None:
        if name in self.cluster.groups and status == 0:
            self.done.add(name)
            return
        fault = self._open.get(name)
        expected = fault is not None and status == -signal.SIGKILL
        if fault is not None and "stopped" in fault.kind:  # its agent gave it up
            fault.ended = time.monotonic()
        if not expected and status != 3:  # 3: it says itself why it could not go on
            self.unplanned.append(f"{name} ended with {status}: {self.cluster.last_words(name)}")
            if len(self.unplanned) >= HOPELESS:
                raise Gone(f"{HOPELESS} processes ended by themselves. The last: {self.unplanned[-1]}")
        self._plan(time.monotonic() + self.random.uniform(*RESTART), "start", name)

    def _start(self, name: str) -> None:
        self.cluster.start(name)
        fault = self._open.pop(name, None)
        if fault is not None and fault.ended is None:
            fault.ended = time.monotonic()


def figures(soak: Soak, said: verdict.Verdict, *, minutes: float, seed: int) -> dict[str, object]:
    lost = [*said.lost_states, *soak.unplanned]
    for job in soak.cluster.groups:
        if job not in said.finals:
            lost.append(f"{job} did not come to its last turn within {END:g} s")
            continue
        steps, digest = said.finals[job]
        say(f"{job}: the undisturbed run of {steps} steps")
        if reference(job, soak.cluster.rows[job], steps) != digest:
            lost.append(f"{job}: its state after {steps} steps is not that of an undisturbed run")
    longest = said.longest
    return {
        "minutes": minutes,
        "seed": seed,
        "handoffs": said.handoffs,
        "grants": said.grants,
        "steps": sum(steps for steps, _ in said.finals.values()),
        "faults": dict(sorted(Counter(fault.kind for fault in soak.faults).items())),
        "given_up_while_stopped": said.given_up,
        "lost_states": len(lost),
        "double_grants": len(said.double_grants),
        "longest_wait_s": round(longest.seconds, 2) if longest else 0.0,
        "wait_bound_s": round(longest.bound, 2) if longest else 0.0,
        "waits_beyond_their_bound": len(said.too_long),
        "undisturbed_bound_s": JOBS // GROUPS * trouble.TURN,
        "said": dict(sorted(said.said.items())),
        "details": [*lost, *said.double_grants, *(str(wait) for wait in said.too_long)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: a new one")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--json", type=Path, default=Path("build/soak.json"), help="figures go here")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    torch.set_num_threads(1)
    # SIGINT too: whoever starts us in the background of a shell has it ignored.
    for ends in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKE)
    folder = Path(tempfile.mkdtemp(prefix="coslice-soak-"))
    say(f"seed {seed}: {options.jobs} jobs on {options.groups} devices for {options.minutes:g} minutes")
    found: dict[str, object] = {}
    try:
        with contextlib.ExitStack() as stack:
            cluster = Cluster(folder)
            stack.callback(cluster.close)
            cluster.populate(groups=options.groups, jobs=options.jobs, rows=ROWS)
            soak = Soak(cluster, seed)
            soak.run(options.minutes)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAKE)  # nobody is left to look after
        with (folder / "faults.jsonl").open("w") as file:
            file.writelines(json.dumps(vars(fault)) + "\n" for fault in soak.faults)
        said = verdict.judge(folder, cluster.groups, soak.faults)
        found = figures(soak, said, minutes=options.minutes, seed=seed)
    except (Interrupted, KeyboardInterrupt):
        shutil.rmtree(folder)
        say("interrupted; nothing is left behind")
        return 130
    except Gone as gone:
        say(f"{gone}; the logs are in {folder}")
        return 1
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    if found["details"]:
        say(f"NOT as promised (seed {seed}); the logs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
