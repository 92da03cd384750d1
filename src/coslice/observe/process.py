"""``process_*``: what Linux says of this process, as prometheus_client tells it. The library lists all open
files to count them: with 10,000 connections that takes 10 ms and more, and all hand-overs would wait."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


class Process(Collector):
    """Of where there is no ``/proc``: nothing."""

    def __init__(self) -> None:
        try:
            lines = (PROC / "stat").read_text().splitlines()
            self._booted = next(float(line.split()[1]) for line in lines if line.startswith("btime "))
        except (OSError, StopIteration):
            self._booted = 0.0

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        if not self._booted:
            return
        with contextlib.suppress(OSError):  # as when no file may be opened any more: that is to be told
            fields = (PROC / "self" / "stat").read_text().rpartition(")")[2].split()
            yield from self._of(fields)
        with contextlib.suppress(OSError):
            files = open_files()
            yield GaugeMetricFamily("process_open_fds", "Number of open file descriptors.", files)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        yield GaugeMetricFamily("process_max_fds", "Maximum number of open file descriptors.", most)

    def _of(self, fields: list[str]) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """``/proc/self/stat`` from its third field on."""
        text = "Virtual memory size in bytes."
        yield GaugeMetricFamily("process_virtual_memory_bytes", text, int(fields[20]))
        resident = int(fields[21]) * resource.getpagesize()
        yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory size in bytes.", resident)
        text = "Start time of the process since unix epoch in seconds."
        started = self._booted + int(fields[19]) / _TICKS
        yield GaugeMetricFamily("process_start_time_seconds", text, started)
        text = "Total user and system CPU time spent in seconds."
        cpu = (int(fields[11]) + int(fields[12])) / _TICKS
        yield CounterMetricFamily("process_cpu_seconds_total", text, cpu)


def open_files() -> int:
    """How many this process has open."""
    folder = PROC / "self" / "fd"
    return folder.stat().st_size or len(os.listdir(folder))  # Linux counts them since 6.2
