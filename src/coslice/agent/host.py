"""How much of the host accelerator's memory a process uses: its anonymous memory, as the kernel counts it.

Used by the app channel to decide whether state really left, and by the sampler. Knows pids and files of
``/proc``, nothing of jobs. Memory files (host buffers) are shared memory and so do not count.

Two sources. ``/proc/PID/statm`` (resident minus shared) costs microseconds, but the kernel keeps such
counters per core and may read them without the cores' unflushed parts. ``smaps_rollup`` walks the page
tables and is exact, at a cost that grows with the process. ``measure`` picks by what is at stake.
"""

import os

PAGE = os.sysconf("SC_PAGE_SIZE")


def counter_error(cpus: int | None = None) -> int:
    """Bytes by which a fast reading may be off: every core may keep back up to a batch of pages.

    ``percpu_counter_batch = max(32, 2 * cores)`` pages (Linux, lib/percpu_counter.c).
    """
    cores = cpus or os.cpu_count() or 1
    return max(32, 2 * cores) * cores * PAGE


class Gone(Exception):
    """The process to be measured has ended."""


class AnonymousMemory:
    """Reads one process's anonymous memory. Keeps ``statm`` open: a reused pid cannot answer in its place."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._statm = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            raise Gone(pid) from None

    def fast(self) -> int:
        """Bytes, from the kernel's counters."""
        try:
            fields = os.pread(self._statm, 256, 0).split()
        except OSError:  # ESRCH once it was reaped, EBADF after close
            raise Gone(self.pid) from None
        if len(fields) < 3:
            raise Gone(self.pid)
        return (int(fields[1]) - int(fields[2])) * PAGE

    def exact(self) -> int:
        """Bytes, by walking the page tables."""
        self.fast()  # still the process we opened, not a later one with its pid
        try:
            with open(f"/proc/{self.pid}/smaps_rollup", "rb") as file:
                for line in file:
                    if line.startswith(b"Anonymous:"):
                        return int(line.split()[1]) * 1024
        except (FileNotFoundError, ProcessLookupError):
            raise Gone(self.pid) from None
        raise Gone(self.pid)  # a zombie: the file is there and empty

    def measure(self, at_stake: int) -> int:
        """Bytes, within 1 % of ``at_stake`` bytes."""
        return self.exact() if counter_error() > at_stake / 100 else self.fast()

    def close(self) -> None:
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1
