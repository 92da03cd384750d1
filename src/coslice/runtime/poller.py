"""Which of gRPC's ways to wait for its sockets a process that only serves takes.

By default six threads share that work and wake one another, which costs a hand-over nearly a millisecond of
processor time on two cores. With its older way the one thread that carries events to the loop polls too.
"""

import importlib.metadata
import os
import sys

ONE_THREAD = "-event_engine_listener"
TRIED = (1, 85)
"""The newest gRPC with which it was tried: a later one may know it no more, and say so at each start."""


def one_thread() -> None:
    """For this process, unless ``GRPC_EXPERIMENTS`` is set. gRPC reads that once: where it is imported
    already nothing changes, nor where it does not say which version it is (vendored, without metadata)."""
    if "grpc._cython.cygrpc" not in sys.modules and _known():
        os.environ.setdefault("GRPC_EXPERIMENTS", ONE_THREAD)


def _known() -> bool:
    try:
        return version(importlib.metadata.version("grpcio")) <= TRIED
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def version(text: str) -> tuple[int, int]:
    """Raises ``ValueError``."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
