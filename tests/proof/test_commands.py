"""The two commands as people and scripts use them."""

import json
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from coslice.cli.chaos import _start

COSLICE = (sys.executable, "-m", "coslice.cli.main")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COSLICE, *arguments], capture_output=True, text=True, timeout=60)


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_chaos_says_what_struck_and_writes_the_figures(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    ended = run("chaos", "--seeds", "6", "--start", "40", "--json", str(out))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads(out.read_text())
    assert (figures["seeds"], figures["start"], figures["violations"]) == (6, 40, 0)
    assert figures["events"] >= 6 * 300
    assert figures["seeds_per_s"] > 0
    assert figures["faults"]
    for kind in figures["faults"]:
        assert kind in ended.stdout


def test_one_seed_tells_its_story_and_the_figures_are_the_same_as_in_a_run_of_many(tmp_path: Path) -> None:
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    told = run("chaos", "--seed", "41", "--json", str(one))
    run("chaos", "--seeds", "1", "--start", "41", "--workers", "1", "--json", str(many))
    assert told.returncode == 0
    assert "why: " in told.stdout
    assert "seed 41:" in told.stdout.splitlines()[-1]
    alone, among = (json.loads(path.read_text()) for path in (one, many))
    assert (alone["events"], alone["faults"]) == (among["events"], among["faults"])


def test_ctrl_c_ends_chaos_at_once_with_the_figures_so_far(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    command = [*COSLICE, "chaos", "--seeds", "20000", "--json", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell starts what runs in its background with Ctrl-C ignored; this one shall hear it in any case.
    with subprocess.Popen(command, preexec_fn=_hear_ctrl_c, **pipes) as chaos:
        try:
            assert chaos.stdout is not None
            assert "20000 seeds" in chaos.stdout.readline()
            chaos.send_signal(signal.SIGINT)
            said, errors = chaos.communicate(timeout=60)
        finally:
            chaos.kill()
    assert chaos.returncode == 130, said + errors
    assert "Traceback" not in errors
    assert json.loads(out.read_text())["seeds"] < 20000


def test_ctrl_c_that_another_thread_hears_cuts_off_no_worker_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Libraries have threads, which block nothing."""
    heard, told = socket.socketpair()
    told.setblocking(False)
    over, begun = threading.Event(), list[SpawnProcess]()
    other = threading.Thread(target=over.wait)
    other.start()

    def start(process: SpawnProcess) -> None:
        assert other.ident is not None
        signal.pthread_kill(other.ident, signal.SIGINT)
        assert heard.recv(1)
        begun.append(process)

    monkeypatch.setattr(SpawnProcess, "start", start)
    known = list[SpawnProcess]()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    waker = signal.set_wakeup_fd(told.fileno())
    try:
        with pytest.raises(KeyboardInterrupt):
            _start(range(2), 2, known)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGINT, handler)
        over.set()
        other.join()
        heard.close()
        told.close()
    assert len(known) == 2
    assert known == begun


def test_explore_names_its_alphabet_and_its_bounds(tmp_path: Path) -> None:
    out = tmp_path / "explore.json"
    ended = run("explore", "--nodes", "1", "--jobs", "2", "--troubles", "0", "--json", str(out))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads(out.read_text())
    assert figures["complete"]
    assert (figures["violations"], figures["stuck_states"]) == (0, 0)
    assert figures["states"] > 10
    assert figures["alphabet"]["acquire"] > 0
    assert "orchestrator killed" in figures["alphabet"]
    assert "In one run: no trouble" in ended.stdout
    assert figures["budget"] == "no trouble"


def test_a_search_that_did_not_end_says_so(tmp_path: Path) -> None:
    out = tmp_path / "explore.json"
    ended = run("explore", "--seconds", "0", "--json", str(out))
    assert ended.returncode == 2
    assert "NOT complete" in ended.stdout
    assert not json.loads(out.read_text())["complete"]
