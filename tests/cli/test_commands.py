"""What people type, and what they get told."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import COSLICE, ENVIRONMENT, TWO_CORES, Start, coslice, in_process, run_arguments

from coslice.cli.run import job_environment
from coslice.errors import ConfigError

SCRIPT = """
import os, sys
import coslice
orchestrator = coslice.connect()

@orchestrator.on_accelerators
def train():
    return sorted(os.sched_getaffinity(0))

print("affinity", train(), flush=True)
"""

HOLD = """
import sys
import coslice
orchestrator = coslice.connect()
with orchestrator.on_accelerators():
    print("holding", flush=True)
    sys.stdin.readline()
"""


def test_an_answer_that_has_no_room_is_an_error_of_one_line() -> None:
    """To a full disk: a traceback, or nothing at all and status 120."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*COSLICE, "profile", "--busy", "5", "--period", "9"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
        )
    assert ended.stderr == "coslice: cannot write the answer: No space left on device\n"
    assert ended.returncode == 1


def test_more_decisions_than_a_message_can_ask_for_are_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback of the encoder."""
    ended = in_process("explain", "default", "--last", str(10**20), monkeypatch=monkeypatch)
    assert ended.returncode == 2
    assert "--last" in ended.stderr


def test_help_teaches_the_first_steps() -> None:
    text = coslice("--help").stdout
    for words in ("coslice demo", "coslice up", "coslice run", "coslice status"):
        assert words in text


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["explain", "default"], ["run", "--job", "a", "--", sys.executable, "-c", "pass"]],
    ids=["status", "explain", "run"],
)
@pytest.mark.timeout(30)
def test_without_an_orchestrator_every_command_says_how_to_start_one(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can meanwhile
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [arguments[0], "-o", address, *arguments[1:]]
        result = in_process(*command, monkeypatch=monkeypatch)
    assert result.returncode == 1
    assert address in result.stderr
    assert "coslice up" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--memory", "lots"], "is not a size"),
        (["up", "--group", "bad name"], "not a group name"),
        pytest.param(["up", "--group", "a", "--group", "a:cpus=0"], "named twice", marks=TWO_CORES),
        (["up", "--group", "a:cpus=0", "--group", "b:cpus=0"], "core 0"),
        (["up", "--group", "a:colour=red"], "memory=512MiB"),
        (["up", "--cpus", "999"], "no such core"),
        (["up", "--policy", "magic"], "fifo"),
        (["up", "--device", "abacus"], "host, cuda or auto"),
        (["up", "--disk-dir", "/tmp"], "add --disk SIZE"),
        (["run", "--job", "a"], "nothing to run"),
        (["run", "--job", "a b", "--", "true"], "not a job name"),
        (["run", "--job", "a", "--", "no-such-command"], "command not found"),
        (["replay", "/nonexistent/journal.jsonl"], "no journal"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_clear_line_and_a_non_zero_exit(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = ["--state", str(tmp_path), "--listen", "127.0.0.1:0"] if arguments[0] == "up" else []
    result = in_process(*arguments[:1], *extra, *arguments[1:], monkeypatch=monkeypatch)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_command_that_fails_leaves_no_traceback(tmp_path: Path) -> None:
    result = coslice("up", "--state", str(tmp_path), "--listen", "127.0.0.1:0", "--memory", "lots")
    assert result.returncode == 2
    assert result.stderr.startswith("coslice: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_port_in_use_names_the_port_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = coslice("up", "--state", str(tmp_path / "state"), "--listen", f"127.0.0.1:{port}")
    assert result.returncode == 2
    assert str(port) in result.stderr
    assert "Traceback" not in result.stderr


def test_a_job_runs_on_the_accelerators_cores_and_the_status_is_its_own(up: Start) -> None:
    server = up("--memory", "256MiB")
    last = sorted(os.sched_getaffinity(0))[-1]
    result = coslice(*run_arguments(server, "a", sys.executable, "-c", SCRIPT))
    assert (result.returncode, result.stdout.strip()) == (0, f"affinity [{last}]"), result.stderr
    failed = coslice(*run_arguments(server, "a", sys.executable, "-c", "raise SystemExit(7)"))
    assert failed.returncode == 7


FORKED = """
import os, sys, time
def connect():
    global channel
    import grpc
    channel = grpc.insecure_channel(sys.argv[sys.argv.index("-o") + 1])  # as one that is not quite closed yet
    grpc.channel_ready_future(channel).result(30)
def look():
    until = time.monotonic() + 0.3  # they come a moment after the fork
    while (count := len(os.listdir("/proc/self/task"))) == 1 and time.monotonic() < until:
        pass
    print(count, "thread", flush=True)
os.register_at_fork(before=connect, after_in_child=look)
from coslice.cli.main import main
main()
"""


def test_the_child_that_becomes_the_command_has_no_threads_of_grpc_and_the_users_environment(
    up: Start,
) -> None:
    """They would find their files closed before the command is there, and end it: status 134, no word."""
    server = up("--memory", "256MiB")
    seen = "import json, os; print(json.dumps(dict(os.environ)))"
    arguments = run_arguments(server, "a", sys.executable, "-c", seen)
    command = [sys.executable, "-c", FORKED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    threads, told, end = done.stdout.split("\n")
    assert (done.returncode, threads, end) == (0, "1 thread", ""), done.stderr
    given = {name: value for name, value in json.loads(told).items() if not name.startswith("COSLICE_")}
    assert given.pop("THP_MEM_ALLOC_ENABLE") == "1"
    assert given == ENVIRONMENT, "what we set for ourselves is not the command's"


def job_made(base: dict[str, str], **options: Any) -> dict[str, str]:
    places: dict[str, Any] = {"groups": ("g",), "need": 0, "world": 0, "orchestrator": "here:1", "agent": ""}
    return job_environment(base, job="b", **places, **{"cpus": (), **options})


def test_a_job_within_another_has_nothing_that_was_set_for_that_and_all_that_people_set() -> None:
    cuda = {"COSLICE_BACKEND": "cuda", "COSLICE_DEVICE": "cuda"}
    for own in ({}, {"COSLICE_BACKEND": "engine", "COSLICE_DEVICE": "host", "COSLICE_PROFILE": "mine"}):
        shell = own | {"COSLICE_ACCELERATOR_CPUS": "7"}
        alone = job_made(shell)
        assert {name: alone[name] for name in shell} == shell
        outer = job_made(shell, moved=cuda, profile="{}", cpus=(3,))
        given = cuda | {"COSLICE_PROFILE": "{}", "COSLICE_ACCELERATOR_CPUS": "3", "THP_MEM_ALLOC_ENABLE": "1"}
        assert {name: outer[name] for name in given} == given
        for around in (outer, job_made(outer, moved=cuda)):
            inner = job_made(around)
            assert inner["COSLICE_INCARNATION"] not in (
                alone["COSLICE_INCARNATION"],
                outer["COSLICE_INCARNATION"],
            )
            assert inner | {"COSLICE_INCARNATION": ""} == alone | {"COSLICE_INCARNATION": ""}
        script = outer | {"COSLICE_BACKEND": "tpu", "COSLICE_PROFILE": "other"}
        inner = job_made(script)
        assert (inner["COSLICE_BACKEND"], inner["COSLICE_PROFILE"]) == ("tpu", "other")


def test_what_another_run_set_is_not_guessed_at() -> None:
    with pytest.raises(ConfigError, match=r"COSLICE_RUN_GAVE .*: unset it"):
        job_made({"COSLICE_RUN_GAVE": "[]"})


def test_memory_for_one_job_and_the_disk_behind_it_are_options(up: Start, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o755)
    host = ("--host-memory", "64MiB", "--host-per-job", "8MiB")
    server = up("--memory", "64MiB", *host, "--disk", "32MiB", "--disk-dir", str(disk))
    (folder,) = disk.iterdir()
    assert (disk.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o755, 0o700)
    status = json.loads(coslice("status", "--json", "-o", server.orchestrator).stdout)
    assert str(32 << 20) in json.dumps(status)
    script = "import sys, torch, coslice\n"
    script += "coslice.workload.register(tensors=torch.ones(4 << 20), job='big', agent=sys.argv[1])\n"
    script += "print('registered', flush=True)\ninput()"
    command = [sys.executable, "-c", script, server.agent]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert job.stdout is not None
    assert job.stdout.readline() == "registered\n"
    refused = coslice("snapshot", "--job", "big", "--agent", server.agent)
    assert refused.returncode == 1
    assert "may keep 8 MiB in host memory and has 16 MiB" in refused.stderr
    job.kill()
    job.wait()


def test_an_unknown_group_names_the_known_ones(up: Start) -> None:
    server = up("--group", "trainers", "--cpus", "0")
    result = coslice(*run_arguments(server, "a", sys.executable, "-c", SCRIPT, group="samplers"))
    assert result.returncode == 1
    assert "samplers" in result.stderr
    assert "trainers" in result.stderr


def test_status_and_explain_tell_who_holds_and_who_waits(up: Start) -> None:
    server = up("--memory", "256MiB")
    start = {"COSLICE_INCARNATION": "one-start"}
    holder = _start(run_arguments(server, "job-a", sys.executable, "-c", HOLD), **start)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    waiter = _start(run_arguments(server, "job-b", sys.executable, "-c", HOLD))
    state = _status_until(server.orchestrator, lambda group: bool(group["waiters"]))
    assert (state["state"], state["job"]) == ("held", "job-a")
    assert [waiting["job"] for waiting in state["waiters"]] == ["job-b"]
    text = coslice("explain", "default", "--job", "job-b", "-o", server.orchestrator).stdout
    assert "job-b" in text
    assert "job-a" in text
    second = coslice(*run_arguments(server, "job-a", sys.executable, "-c", HOLD))
    assert second.returncode == 1
    assert "already running" in second.stderr
    # As a script of Slurm starts it on another node: the same start.
    part = coslice(*run_arguments(server, "job-a", sys.executable, "-c", SCRIPT), **start)
    assert (part.returncode, part.stderr) == (0, "")
    for process in (holder, waiter):
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(30) == 0


def test_ctrl_c_leaves_no_process_and_no_socket(up: Start, tmp_path: Path) -> None:
    server = up("--memory", "256MiB")
    job = _start(run_arguments(server, "a", sys.executable, "-c", HOLD))
    assert job.stdout is not None
    job.stdout.readline()
    job.send_signal(signal.SIGTERM)  # what a scheduler sends; Ctrl-C reaches the whole process group
    assert job.wait(30) != 0
    assert server.stop() == 0
    assert not list((tmp_path / "state").rglob("*.sock"))
    for address in (server.orchestrator, server.agent):
        host, port = address.rsplit(":", 1)
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0


def test_the_journal_of_a_run_becomes_a_page(up: Start, tmp_path: Path) -> None:
    server = up("--memory", "256MiB")
    coslice(*run_arguments(server, "a", sys.executable, "-c", SCRIPT))
    server.stop()
    page = tmp_path / "page.html"
    result = coslice("replay", str(server.journal), "--out", str(page))
    assert result.returncode == 0, result.stderr
    assert "LeaseYielded" not in page.read_text()  # intervals and reasons, not raw events
    assert '"job":"a"' in page.read_text()


def _start(arguments: list[str], **environment: str) -> "subprocess.Popen[str]":
    command, env = [*COSLICE, *arguments], ENVIRONMENT | environment
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def _status_until(address: str, wanted: "object") -> dict[str, object]:
    """Follow ``status --watch`` until the group looks as ``wanted``; the stream is pushed, not asked."""
    watch = _start(["status", "--watch", "--json", "-o", address])
    assert watch.stdout is not None
    try:
        for line in watch.stdout:
            group = json.loads(line)["groups"][0]
            if wanted(group):  # type: ignore[operator]
                return dict(group)
    finally:
        watch.kill()
        watch.wait()
    raise AssertionError("the status stream ended")


def test_without_the_servers_packages_the_command_says_what_to_install() -> None:
    """In a training image only the client may be there."""
    code = "import sys; sys.modules['typer'] = None; from coslice.cli.entry import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "coslice[server]" in result.stderr
    assert "Traceback" not in result.stderr
