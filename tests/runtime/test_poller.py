"""The way in which gRPC waits for its sockets: chosen before it is loaded, and one that it knows."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from coslice.runtime import poller

SCRIPT = """
import os
from coslice.runtime.poller import one_thread
one_thread()
import grpc.aio
print(os.environ.get("GRPC_EXPERIMENTS", ""))
"""


def chosen(**environment: str) -> str:
    """In a process of its own; fails if gRPC complains about the choice."""
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**clean, **environment}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_the_installed_grpc_knows_the_one_thread() -> None:
    assert chosen() == poller.ONE_THREAD


def test_what_the_environment_says_goes_first() -> None:
    assert chosen(GRPC_EXPERIMENTS="-event_engine_client") == "-event_engine_client"


def test_a_newer_grpc_than_was_tried_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.delitem(sys.modules, "grpc._cython.cygrpc", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.86.0")
    poller.one_thread()
    assert "GRPC_EXPERIMENTS" not in os.environ


@pytest.mark.parametrize("found", [None, "", "1", "1.85rc1"])
def test_a_grpc_of_unknown_version_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    def told(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.delitem(sys.modules, "grpc._cython.cygrpc", raising=False)
    monkeypatch.setattr("importlib.metadata.version", told)
    poller.one_thread()
    assert "GRPC_EXPERIMENTS" not in os.environ


def test_nothing_changes_once_grpc_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc.aio  # noqa: F401

    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    poller.one_thread()
    assert "GRPC_EXPERIMENTS" not in os.environ
