"""``coslice bench scale``: one orchestrator process, thousands of groups, and a connection for every job.

The orchestrator is real, with SQLite FULL, its journal and its metrics, which are scraped meanwhile, and
alone in its process; what loads it runs in others (``bench_scale_load``), whose processor time is not
counted. Keepalives are 30 s on both sides.

Hand-overs are timed twice: by the load, from a yield to the next job's grant (``handoff_ms``), and by the
orchestrator's own histograms (``server_ms``), from the yield's arrival to the grant on its stream. How late
the load itself came to what was due is told beside (``load_lag_ms``), and the hand-overs during which its
process was not late (``handoff_in_time_ms``). Measured is a steady state: all have asked, and every lock has
been passed on once.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coslice.cli.bench import _summary
from coslice.cli.bench_processes import serve, start
from coslice.cli.bench_scale_load import KEEPALIVE_S
from coslice.cli.bench_scale_server import Scraper
from coslice.cli.rpc import orchestrator
from coslice.errors import OperationFailed
from coslice.wire.v1 import coslice_pb2 as pb

PER_LOAD = 250
"""Groups of one process of the load."""
PER_NODE = 50
GRACE_S = 10
IDLE_S = 20.0
SCRAPE_S = 15.0
"""Between two scrapes of the orchestrator, as Prometheus would."""
console = Console(highlight=False, emoji=False)
_TICKS = os.sysconf("SC_CLK_TCK")


class Loader:
    """A process of the load."""

    def __init__(self, stack: ExitStack, address: str, first: int, groups: int, jobs: int) -> None:
        self.group = f"g{first}"
        nodes = max(1, groups // PER_NODE)
        words = [address, *(str(n) for n in (first, groups, jobs, nodes))]
        self._process = start(stack, "coslice.cli.bench_scale_load", *words)
        stack.callback(self.kill)

    def tell(self, do: str, **more: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OperationFailed(f"a process of the load ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        """As a machine that is cut off: its connections stay open, and nobody answers on them."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def bench_scale(*, groups: int, jobs: int, rate: float, seconds: float, out: Path | None) -> None:
    """``jobs``: in all. ``rate``: hand-overs a second, all groups together."""
    each = jobs // groups
    if each < 2:
        raise OperationFailed(f"{jobs} jobs in {groups} groups: a hand-over needs two jobs in each")
    with tempfile.TemporaryDirectory(prefix="coslice-scale-") as folder, ExitStack() as stack:
        per_load = min(PER_LOAD, max(1, groups // 3))
        server, address, http = _serve(stack, Path(folder), groups, jobs)
        loaders = []
        for first in range(0, groups, per_load):
            loaders.append(Loader(stack, address, first, min(per_load, groups - first), each))
        began = time.monotonic()
        connected = sum(a["jobs"] for a in _all(loaders, "connect"))
        console.print(f"{connected:,} jobs are connected after {time.monotonic() - began:.0f} s")
        began = time.monotonic()
        _all(loaders, "ask")
        console.print(f"all of them have asked after {time.monotonic() - began:.0f} s")
        idle = _idle(server)
        period = groups / rate
        _run(loaders, period, period, groups)  # every lock once: what is new then is new only once
        scraper = stack.enter_context(Scraper(f"{http}/metrics", SCRAPE_S))
        before, waited, wall = _cpu(server), _waited(server), time.monotonic()
        ran = _run(loaders, seconds, period, groups)
        wall = time.monotonic() - wall
        busy, short = (_cpu(server) - before) / wall, (_waited(server) - waited) / wall
        server_ms = scraper.end()
        rss = _rss(server)
        in_time = [took for one in ran for took in one["took_in_time"]]
        figures: dict[str, Any] = {
            "groups": groups,
            "jobs": connected,
            "rate": rate,
            "handoff_ms": _summary([took for one in ran for took in one["took"]]),
            "handoff_in_time_ms": _summary(in_time) if in_time else None,
            "load_lag_ms": _summary([late for one in ran for late in one["lag"]]),
            "server_ms": server_ms,
            "scrape_ms": scraper.took,
            "missed": sum(one["missed"] for one in ran),
            "troubles": [trouble for one in ran for trouble in one["troubles"]],
            "busy_cpu_pct": round(100 * busy, 1),
            "cpu_wait_pct": round(100 * short, 1),
            "idle_cpu_pct": round(100 * idle, 1),
            "rss_mib": round(rss / (1 << 20), 1),
            "keepalive_s": KEEPALIVE_S,
            "lease_detection_s": _detection(address, loaders),
            "load": os.getloadavg()[0],
        }
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    _print(figures)


def _all(loaders: Sequence[Loader], do: str) -> list[dict[str, Any]]:
    for loader in loaders:
        loader.tell(do)
    return [loader.answer() for loader in loaders]


def _run(loaders: Sequence[Loader], seconds: float, period: float, groups: int) -> list[dict[str, Any]]:
    begin = time.monotonic() + 0.5  # all of them have heard of it by then
    for number, loader in enumerate(loaders):
        loader.tell("run", begin=begin, seconds=seconds, period=period, offset=number * period / groups)
    return [loader.answer() for loader in loaders]


def _detection(address: str, loaders: Sequence[Loader]) -> dict[str, float]:
    """After how long the lease of a holder ends whose process was killed, and of one that fell silent."""
    found = {}
    for loader, lose, name in zip(reversed(loaders), ("kill", "stop"), ("killed", "silent"), strict=False):
        getattr(loader, lose)()
        began = time.monotonic()
        with orchestrator(address) as stub:
            for status in stub.WatchStatus(pb.GetStatusRequest(group=loader.group)):
                if all(group.state != "held" for group in status.groups):
                    break
        found[name] = round(time.monotonic() - began, 1)
    return found


def _serve(stack: ExitStack, state: Path, groups: int, jobs: int) -> tuple[int, str, str]:
    """Its process, its address, and that of its pages."""
    limits = {
        "max_sessions": jobs + 100,
        "max_groups": groups + 1,
        "keepalive": KEEPALIVE_S,
        "session_grace": GRACE_S,
    }
    words = [word for name, value in limits.items() for word in ("--set", f"{name}={value}")]
    pid, said = serve(
        stack,
        "orchestrator",
        *("--http", "127.0.0.1:0", "--policy", "fifo", "--state", str(state), "--log-level", "error", *words),
    )
    return pid, str(said["orchestrator"]), str(said["http"])


def _cpu(pid: int) -> float:
    """Seconds of processor time so far (proc(5), fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _waited(pid: int) -> float:
    """Seconds so far that its event loop could have gone on and had no core (sched-stats, 2nd field)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def _idle(pid: int) -> float:
    """Share of a core that it takes while nobody asks for anything."""
    before, began = _cpu(pid), time.monotonic()
    time.sleep(IDLE_S)  # a measurement over time
    return (_cpu(pid) - before) / (time.monotonic() - began)


def _rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def _print(figures: dict[str, Any]) -> None:
    took = figures["handoff_ms"]
    table = Table(title=f"{figures['groups']:,} groups, {figures['jobs']:,} jobs", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row(f"hand-over at {figures['rate']:g}/s, p50", f"{took['p50']:.1f} ms")
    table.add_row("hand-over, p99", f"{took['p99']:.1f} ms")
    if (in_time := figures["handoff_in_time_ms"]) is not None:
        table.add_row(f"… while the load was in time ({in_time['n']:,}), p99", f"{in_time['p99']:.1f} ms")
    table.add_row("the load late, p99", f"{figures['load_lag_ms']['p99']:.1f} ms")
    for name, own in figures["server_ms"].items():
        table.add_row(f"orchestrator: {name}, p50, p99", f"{own['p50']:.1f}, {own['p99']:.1f} ms")
    table.add_row("hand-overs measured, moments missed", f"{took['n']:,}, {figures['missed']:,}")
    table.add_row("processor, busy", f"{figures['busy_cpu_pct']:.0f} % of a core")
    table.add_row("… waited for a core", f"{figures['cpu_wait_pct']:.0f} % of the time")
    table.add_row("processor, idle", f"{figures['idle_cpu_pct']:.0f} % of a core")
    table.add_row("memory", f"{figures['rss_mib']:,.0f} MiB")
    found = figures["lease_detection_s"]
    for name, after in found.items():
        table.add_row(f"lease of a {name} holder ended after", f"{after:g} s")
    console.print(table)
    for trouble in figures["troubles"]:
        console.print(f"[red]{trouble}[/red]")
