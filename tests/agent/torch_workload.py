"""A workload of real torch state for the agent's tests. Run it as a script: job, group, MiB, need in MiB.

Words on stdin: ``digest``, ``step``, ``break N`` (saving fails at the N-th part from now), ``mend``; each is
answered by a line of JSON.
"""

import ctypes
import hashlib
import json
import sys
from typing import Any

import torch

from coslice.errors import OperationFailed
from coslice.workload import register
from coslice.workload.registry import GroupState

MIB = 1 << 20


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def digest(tensors: list[torch.Tensor]) -> str:
    """Without a copy, which the agent would count as state on the device."""
    total = hashlib.sha256()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        total.update((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
    return total.hexdigest()


def main() -> None:
    job, group, size, need = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.manual_seed(len(job))
    tensors = [torch.randn(MIB // 4) for _ in range(size)]
    save, left = GroupState._save, [1 << 30]

    def breaking(self: GroupState, *what: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OperationFailed("broken by the test")
        save(self, *what)

    GroupState._save = breaking  # type: ignore[method-assign]
    handle = register(tensors=tensors, job=job, group=group, need=need * MIB, verify=True)
    say(event="registered", error=str(handle.error or ""))
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "step":
            for tensor in tensors:
                tensor.add_(1.0)
        elif word in ("break", "mend"):
            left[0] = int(rest or 1 << 30)
        say(event="did", word=word, digest=digest(tensors) if word == "digest" else "")


if __name__ == "__main__":
    main()
