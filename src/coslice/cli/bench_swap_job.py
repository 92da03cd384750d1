"""One job of ``coslice bench swap``: real torch state, told by lines of JSON what to do, answering in kind.

The plain copies that swaps are compared with are made here too: by as many threads, of as many bytes, in the
same process as the swap's own.
"""

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import coslice
from coslice.workload import copying, register
from coslice.workload.copying import Range

MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Job:
    """``size``: bytes of state, in parameters of ``piece`` bytes with the two moments of AdamW each; with
    ``base`` so many bytes of frozen weights beside them."""

    def __init__(self, *, size: int, piece: int = MIB, base: int = 0, cores: Sequence[int] = ()) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
        count = max(1, size // (3 * piece))
        self.trained = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((piece // 4,), 0.5)) for _ in range(count)
        )
        self.base = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((piece // 4,), 2.0), requires_grad=False)
            for _ in range(base // piece)
        )
        self.optimizer = torch.optim.AdamW(self.trained.parameters(), lr=1e-3, fused=True)
        self.aside = self.spare = 0
        self.map: mmap.mmap | None = None
        self.client: coslice.Client | None = None
        self.handle: Any = None
        self.step()

    def step(self, count: int = 0) -> None:
        """A real step of the optimizer, on the first ``count`` parameters; 0: on all."""
        chosen = list(self.trained)[: count or None]
        for parameter in chosen:
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def register(self, *, group: str = "", need: int = 0, orchestrator: str = "", name: str = "") -> int:
        """Returns the bytes of its state. With an orchestrator it takes turns, else it is told to move."""
        model = torch.nn.ModuleDict({"lora_a": self.trained, "base": self.base})
        if orchestrator:
            self.client = coslice.Client(orchestrator, job=name, groups=[group], need=need)
        self.handle = register(model, self.optimizer, job=name, group=group, need=need)
        if self.handle.error is not None:
            raise self.handle.error
        return int(self.handle.state_bytes)

    def incremental(self, on: bool) -> None:
        for adapter in self.handle._registration.adapters:
            adapter.incremental = on

    def turn(self, count: int = 0) -> dict[str, float]:
        """Acquire, compute, yield."""
        assert self.client is not None
        began = time.perf_counter()
        grant = self.client.acquire(timeout=120.0)
        waited = time.perf_counter() - began
        self.step(count)
        self.client.yield_()
        (lease,) = grant.leases
        return {"bytes_in": lease.bytes_in, "bytes_out": lease.bytes_out, "seconds": waited}

    # ── plain copies ───────────────────────────────────────────────────────

    def keep_aside(self) -> None:
        """Memory for the plain copies, made before the state is registered: nobody counts it as state."""
        self.spare = sum(storage.nbytes() for storage in self._storages())
        self.map = mmap.mmap(-1, self.spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = ctypes.c_char.from_buffer(self.map)
        self.aside = ctypes.addressof(view)
        ctypes.memset(self.aside, 1, self.spare)

    def _storages(self) -> list[Any]:
        moments = [m for s in self.optimizer.state.values() for m in s.values()]
        return [t.untyped_storage() for t in (*self.trained, *self.base, *moments)]

    def memcpy(self) -> float:
        """Seconds to copy the state out and back, between memory that is all there."""
        out, at = [], self.aside
        for storage in self._storages():
            out.append(Range(at, storage.data_ptr(), storage.nbytes()))
            at += storage.nbytes()
        back = [Range(each.source, each.target, each.size) for each in out]
        began = time.perf_counter()
        copying.copy_all(out)
        copying.copy_all(back)
        return time.perf_counter() - began

    def plain_swap(self, huge: bool = False) -> float:
        """Seconds to do a swap's work with malloc, memcpy and free: copy out, and to fresh memory back.

        One block: of smaller ones malloc keeps some pages for itself, and what is not freed costs nothing.
        """
        out, at = [], self.aside
        for storage in self._storages():
            out.append(Range(at, storage.data_ptr(), storage.nbytes()))
            at += storage.nbytes()
        began = time.perf_counter()
        copying.copy_all(out)
        block = _libc.malloc(self.spare)
        if huge:
            low, high = -(-block // (2 * MIB)) * 2 * MIB, (block + self.spare) // (2 * MIB) * 2 * MIB
            _libc.madvise(low, high - low, mmap.MADV_HUGEPAGE)
        copying.copy_all([Range(block, self.aside, self.spare)])
        _libc.free(block)
        return time.perf_counter() - began

    def half_swap(self, back: bool) -> float:
        """One way of a swap: out is a copy; back is malloc, copy and free, of what was kept aside."""
        storages = self._storages() if not back else []
        began = time.perf_counter()
        if not back:
            ranges, at = [], self.aside
            for storage in storages:
                ranges.append(Range(at, storage.data_ptr(), storage.nbytes()))
                at += storage.nbytes()
            copying.copy_all(ranges)
        else:
            block = _libc.malloc(self.spare)
            copying.copy_fresh([Range(block, self.aside, self.spare)])
            _libc.free(block)
        return time.perf_counter() - began


def main() -> None:
    job: Job | None = None
    for line in sys.stdin:
        order = json.loads(line)
        verb, arguments = order["do"], order.get("with", {})
        if verb == "begin":
            job = Job(**arguments)
            answer: Any = copying.threads()
        else:
            does: Callable[..., Any] = getattr(job, verb)
            answer = does(**arguments)
        print(json.dumps({"answer": answer}), flush=True)
    if job is not None and job.client is not None:
        job.client.close()


if __name__ == "__main__":
    main()
