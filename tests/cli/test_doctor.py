"""``coslice doctor``: each fault of a machine is a finding with its fix; a sound machine has none."""

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Start, coslice, in_process

from coslice.agent.discovery.survey import Gpu, Survey
from coslice.cli.doctor import examine
from coslice.cli.doctor_facts import Finding, Level, Machine
from coslice.cli.doctor_jobs import engines
from coslice.cli.doctor_node import NODE_CHECKS
from coslice.testing.engines import FakeEngine

GIB = 1 << 30


def sound(root: Path, **changes: Any) -> Machine:
    """A machine with one GPU and nothing wrong."""
    put(root, "/proc/meminfo", "MemTotal: 1 kB\nMemAvailable: 536870912 kB\n")
    put(root, "/proc/self/status", "Name:\tx\nNSpid:\t12\nCapEff:\t0000000000000000\n")
    put(root, "/proc/self/mounts", "proc /proc proc rw 0 0\n")
    put(root, "/proc/sys/vm/overcommit_memory", "0\n")
    gpu = Gpu(index=0, uuid="GPU-1", name="H100", total=80 * GIB, persistence=True)
    values: dict[str, Any] = {
        "root": root,
        "survey": Survey(driver="580.95.05", cuda=13000, gpus=(gpu,)),
        "packages": {"cuda-bindings": "13.4.1", "nvidia-ml-py": "13.0"},
        "shm": 16 * GIB,
        "files": 65536,
    }
    return Machine(**{**values, **changes})


def put(root: Path, path: str, text: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def bad(machine: Machine) -> list[Finding]:
    found = examine(machine, NODE_CHECKS)
    return [each for each in found if each.level in (Level.WARNING, Level.PROBLEM)]


def gpus(count: int = 1, *, driver: str = "580.95.05", cuda: int = 13000, **values: Any) -> Survey:
    each = {"name": "H100", "total": 80 * GIB, "persistence": True, **values}
    made = tuple(Gpu(index=i, uuid=f"GPU-{i}", **each) for i in range(count))
    return Survey(driver=driver, cuda=cuda, gpus=made)


def test_a_sound_machine_has_no_finding_that_needs_a_fix(tmp_path: Path) -> None:
    assert bad(sound(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "files", "check", "level", "words", "fix"),
    [
        ({"survey": gpus(driver="560.1", cuda=12060)}, {}, "driver", "problem", "570", ""),
        ({"survey": gpus(2, driver="570.1", cuda=12080)}, {}, "driver", "warning", "575.57.08", ""),
        ({"survey": gpus(mig=True)}, {}, "driver", "problem", "MIG", ""),
        ({"survey": gpus(persistence=False)}, {}, "driver", "warning", "nvidia-smi -pm 1", ""),
        ({"survey": gpus(mps_clients=(7,))}, {}, "mps", "problem", "pids 7", "nvidia-cuda-mps-control"),
        ({"survey": gpus(ecc_uncorrected=3)}, {}, "ecc", "problem", "3 uncorrected", "reset"),
        (
            {"survey": Survey(error="Unknown Error")},
            {"/proc/driver/nvidia/version": "x"},
            "driver",
            "problem",
            "Unknown Error",
            "coslice[cuda]",
        ),
        ({"packages": {}}, {}, "bindings", "warning", "neither", "coslice[cuda]"),
        ({"packages": {"cuda-bindings": "13.3.0"}}, {}, "bindings", "problem", "13.3.0", ">=13.4"),
        ({"packages": {"cuda-bindings": "13.0.0"}}, {}, "bindings", "problem", "13.0.0", ">=13.4"),
        ({"packages": {"cuda-bindings": "12.6.2"}}, {}, "bindings", "problem", "12.6.2", ">=13.4"),
        ({"arch": "aarch64"}, {}, "arch", "warning", "arm64", "coslice snapshot"),
        ({"uid": 1000}, {}, "privileges", "warning", "CAP_SYS_PTRACE", "setcap"),
        (
            {},
            {"/proc/self/status": "NSpid:\t12\t1\nCapEff:\t0\n"},
            "privileges",
            "warning",
            "pid namespace",
            "hostPID",
        ),
        (
            {"uid": 1000},
            {
                "/proc/self/mounts": "proc /proc proc rw,hidepid=2 0 0\n",
                "/proc/self/status": "CapEff:\t0000000000080000\n",
            },
            "privileges",
            "warning",
            "hidepid",
            "remount",
        ),
        ({}, {"/proc/meminfo": "MemAvailable: 1048576 kB\n"}, "host memory", "warning", "1 GiB", "refuses"),
        ({}, {"/proc/sys/vm/overcommit_memory": "2\n"}, "host memory", "warning", "overcommit", "sysctl"),
        ({"shm": 64 << 20}, {}, "/dev/shm", "warning", "64 MiB", "--shm-size"),
        ({"memlock": 65536}, {}, "memlock", "warning", "64 KiB", "ulimit -l"),
        ({"files": 1024}, {}, "open files", "warning", "1024", "ulimit -n"),
        (
            {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
            {},
            "allocator",
            "warning",
            "PYTORCH_CUDA_ALLOC_CONF",
            "unset",
        ),
        ({"survey": gpus(2)}, {}, "nccl", "warning", "multicast", "NCCL_NVLS_ENABLE=0"),
        ({"env": {"CUDA_INJECTION64_PATH": "/x"}}, {}, "profilers", "warning", "profiler", "unset"),
        ({}, {"/dev/accel0": "", "/tmp/libtpu_lockfile": ""}, "tpu", "warning", "libtpu_lockfile", "rm "),
        ({"system": "Darwin"}, {}, "system", "problem", "Darwin", "Linux"),
    ],
)
def test_each_fault_is_found_alone_and_has_its_fix(
    changes: dict[str, Any],
    files: dict[str, str],
    check: str,
    level: str,
    words: str,
    fix: str,
    tmp_path: Path,
) -> None:
    machine = sound(tmp_path, **changes)
    for path, text in files.items():
        put(tmp_path, path, text)
    found = [each for each in bad(machine) if each.check == check]
    assert [each.level for each in found] == [level]
    assert words in found[0].text
    assert found[0].fix
    assert fix in found[0].fix


def test_what_several_gpus_need_is_fine_once_it_is_set(tmp_path: Path) -> None:
    assert bad(sound(tmp_path, survey=gpus(2), env={"NCCL_NVLS_ENABLE": "0"})) == []


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(tmp_path: Path) -> None:
    def broken(machine: Machine) -> Iterator[Finding]:
        raise ZeroDivisionError("oh")

    found = list(examine(sound(tmp_path), [broken, *NODE_CHECKS]))
    assert "oh" in found[0].text
    assert len(found) > 3


@pytest.mark.parametrize(
    ("command", "env", "level", "fix"),
    [
        (
            ["vllm", "serve", "m", "--enable-sleep-mode", "--host", "127.0.0.1"],
            {"VLLM_SERVER_DEV_MODE": "1"},
            "ok",
            "",
        ),
        (
            ["/x/bin/python", "/x/bin/vllm", "serve", "m"],
            {},
            "warning",
            "--enable-sleep-mode and VLLM_SERVER",
        ),
        (["vllm", "serve", "m", "--enable-sleep-mode"], {}, "warning", "VLLM_SERVER_DEV_MODE=1"),
        (
            ["vllm", "serve", "m", "--enable-sleep-mode"],
            {"VLLM_SERVER_DEV_MODE": "1"},
            "warning",
            "--host 127.0.0.1",
        ),
        (["python", "-m", "vllm.entrypoints.openai.api_server"], {}, "warning", "--enable-sleep-mode"),
        (["python", "-m", "sglang.launch_server"], {}, "warning", "--enable-memory-saver"),
        (
            ["python", "-m", "sglang.launch_server", "--enable-memory-saver"],
            {},
            "warning",
            "--enable-weights-cpu-backup",
        ),
        (
            ["python", "-m", "sglang.launch_server", "--enable-memory-saver", "--enable-weights-cpu-backup"],
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            "problem",
            "PYTORCH_ALLOC_CONF",
        ),
        (
            ["sglang", "serve", "--enable-memory-saver", "--enable-weights-cpu-backup", "--nnodes=2"],
            {},
            "problem",
            "NCCL_GRAPH_REGISTER=0",
        ),
    ],
)
def test_flags_of_running_engines_are_read_from_their_processes(
    command: list[str], env: dict[str, str], level: str, fix: str, tmp_path: Path
) -> None:
    machine = sound(tmp_path)
    put(tmp_path, "/proc/77/cmdline", "\0".join(command) + "\0")
    put(tmp_path, "/proc/77/environ", "\0".join(f"{name}={value}" for name, value in env.items()) + "\0")
    put(tmp_path, "/proc/78/cmdline", "python\0train.py\0")
    (found,) = engines(machine)
    assert (found.level, fix in found.fix) == (level, True)
    assert "pid 77" in found.text


def doctor(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]], str]:
    result = coslice("doctor", "--json", *arguments, **environment)
    if result.returncode not in (0, 1):
        return result.returncode, {}, result.stderr
    facts = json.loads(result.stdout)
    return result.returncode, {each["check"]: each for each in facts["findings"]}, result.stderr


def test_on_a_running_system_it_says_who_answers(up: Start) -> None:
    served = up()
    status, found, _ = doctor("-o", served.orchestrator, "--agent", served.agent)
    assert status == 0
    assert found["orchestrator"]["level"] == found["agent"]["level"] == "ok"
    assert "default" in found["orchestrator"]["text"]


def test_a_port_that_another_program_has_is_a_problem_with_its_pid() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as other:
        threading.Thread(target=other.serve_forever).start()  # it closes every connection at once
        address = f"127.0.0.1:{other.server_address[1]}"
        status, found, _ = doctor("-o", address, "--agent", "127.0.0.1:1")
        other.shutdown()
    assert status == 1
    assert f"process {os.getpid()}" in found["orchestrator"]["text"]
    assert found["agent"]["level"] == "note"


def test_an_engine_is_asked_whether_it_can_sleep_and_nothing_moves() -> None:
    with FakeEngine("vllm", weights=1 << 20, kv=1 << 20) as good, FakeEngine("vllm", "--no-dev-mode") as odd:
        status, found, _ = doctor("--agent", "127.0.0.1:1", "-o", "127.0.0.1:1", "--endpoint", good.url)
        assert (status, found["engine"]["level"]) == (0, "ok")
        assert not any("POST /sleep" in call for call in good.calls())
        status, found, _ = doctor("--agent", "127.0.0.1:1", "-o", "127.0.0.1:1", "--endpoint", odd.url)
    assert (status, "VLLM_SERVER_DEV_MODE=1" in found["engine"]["text"]) == (1, True)


def test_for_people_it_prints_findings_with_arrows_to_their_fix() -> None:
    result = coslice("doctor", "-o", "127.0.0.1:1", "--agent", "127.0.0.1:1")
    assert result.returncode == 0
    assert "none answers at 127.0.0.1:1" in result.stdout
    assert "→ `coslice up` starts one" in result.stdout


# ── coslice snapshot and restore ──────────────────────────────────────────────

SERVER = """
import os, sys
from coslice.testing.engines import FakeEngine
with FakeEngine("vllm", weights=8 << 20, kv=8 << 20) as engine:
    from coslice.workload import register
    handle = register(endpoint=engine.url)
    assert handle.error is None, handle.error
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def test_a_job_is_moved_by_hand_and_back(up: Start) -> None:
    served = up()
    environment = {**os.environ, "COSLICE_AGENT": served.agent, "COSLICE_JOB": "judge"}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as job:
        assert job.stdout is not None
        pid = job.stdout.readline().strip()
        assert pid
        moved = coslice("snapshot", "--agent", served.agent, "--job", "judge", "--json")
        assert moved.returncode == 0, moved.stderr
        facts = json.loads(moved.stdout)
        assert (facts["job"], facts["state"], facts["bytes"] > 8 << 20) == ("judge", "saved", True)
        assert "moving judge out" in moved.stderr
        again = coslice("snapshot", "--agent", served.agent, "--job", "judge")
        assert "nothing moved" in again.stdout
        by_pid = coslice("snapshot", "--agent", served.agent, "--pid", pid)
        assert by_pid.returncode == 1
        assert "admin" in by_pid.stderr
        stranger = coslice("snapshot", "--agent", served.agent, "--pid", "1")
        assert stranger.returncode == 2
        assert f"{pid} (judge)" in stranger.stderr
        back = coslice("restore", "--agent", served.agent, "--job", "judge")
        assert back.returncode == 0
        assert "judge is on the device" in back.stdout
        job.stdin.close()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["snapshot"], 2, "--job NAME"),
        (["restore"], 2, "--job NAME"),
        (["snapshot", "--job", "a", "--agent", "127.0.0.1:1"], 1, "coslice up"),
        (["restore", "--job", "a", "--agent", "nonsense"], 2, "host:port"),
        (
            ["run", "--job", "a", "--backend", "cuda", "--endpoint", "http://127.0.0.1:1", "--", "true"],
            2,
            "--backend",
        ),
    ],
)
def test_moving_by_hand_refuses_with_one_line(
    arguments: list[str], status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = in_process(*arguments, monkeypatch=monkeypatch)
    assert result.returncode == status
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
