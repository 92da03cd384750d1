"""What holds at the borders of a process: imports, forks, its end, and aliases that nothing can guard."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run
from workload.fake_agent import FakeAgent

from coslice.workload.buffers import LocalBuffers


def test_importing_brings_neither_torch_nor_the_core() -> None:
    program = (
        "import sys, coslice.workload\n"
        "from coslice.errors import ConfigError\n"
        "heavy = {'torch', 'numpy', 'msgspec', 'coslice.core', 'asyncio'} & set(sys.modules)\n"
        "assert heavy <= {'asyncio'}, heavy\n"
        "try: coslice.workload.register(object(), env={})\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "torch is not loaded" in done.stdout


ALIASES = {
    "a view": "alias = w[0]; away(); alias.sum()",
    "a detached tensor": "alias = w.detach(); away(); alias.add_(1)",
    "a pending backward": "x = torch.ones(1, 2048).requires_grad_()\ny = (x @ w).sum(); away(); y.backward()",
    "torch functions switched off": "away()\nwith torch._C.DisableTorchFunctionSubclass(): w + 1",
}


@pytest.mark.parametrize("alias", ALIASES)
def test_unguarded_aliases_of_parked_state_end_the_process_or_raise(alias: str, tmp_path: Path) -> None:
    """Documented limits. What must not happen is that training goes on with wrong numbers."""
    done = run(
        "import torch\n"
        "from coslice.workload import register\n"
        "w = torch.nn.Parameter(torch.ones(2048, 512))\n"
        "away = register(tensors=w, env={}).offload\n" + ALIASES[alias],
        folder=tmp_path,
    )
    assert done.returncode != 0, done.stdout


FORKS = """
import os, sys, threading
import torch
from coslice.errors import StateOffloaded
from coslice.gate import GATE
from coslice.workload import register

model = torch.nn.Linear(256, 256)
handle = register(model, env={"COSLICE_AGENT": sys.argv[1], "COSLICE_JOB": "j", "COSLICE_GROUP": "g"})

def child(expect_parked):
    assert [t.name for t in threading.enumerate()] == ["MainThread"]
    assert (handle.state_bytes, handle.parked, handle.error) == (0, False, None)
    handle.refresh()
    handle.close()
    try:
        model(torch.ones(1, 256))
        assert not expect_parked
    except StateOffloaded:
        assert expect_parked
    own = torch.nn.Linear(16, 16)
    mine = register(own, env={})
    assert mine.offload() == mine.restore() > 0
    sys.exit(7)  # through the interpreter's own end, as a script would

def fork(expect_parked):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        child(expect_parked)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

torch.set_num_threads(1)
print(fork(False), flush=True)
sys.stdin.readline()
print(fork(True), flush=True)
sys.stdin.readline()
model(torch.ones(1, 256))
print("done")
"""


def test_a_forked_child_inherits_nothing_and_the_parent_goes_on(tmp_path: Path) -> None:
    with FakeAgent(tmp_path) as agent:
        parent = subprocess.Popen(
            [sys.executable, "-c", FORKS, agent.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        assert parent.stdin is not None
        stream = agent.stream()
        assert parent.stdout.readline() == "7\n"
        assert stream.move_out("op/out").HasField("moved")
        print(file=parent.stdin, flush=True)
        assert parent.stdout.readline() == "7\n"
        assert stream.move_in("op/in").HasField("moved")
        print(file=parent.stdin, flush=True)
        assert parent.stdout.read() == "done\n"
        assert parent.wait(60) == 0
        assert agent.streams.empty()


def test_a_child_does_not_close_what_has_the_number_of_its_parents_buffer() -> None:
    """One that is forked while another thread closes the buffer."""
    high = 900  # a number that nobody else is given
    aside = os.memfd_create("another's")
    buffers = LocalBuffers()
    buffer = buffers.obtain(4096)
    os.close(buffer.fd)
    buffer.fd = fcntl.fcntl(aside, fcntl.F_DUPFD_CLOEXEC, high)
    number = buffer.fd
    buffer.close()
    assert fcntl.fcntl(aside, fcntl.F_DUPFD_CLOEXEC, high) == number
    buffer.forget()
    assert os.path.samestat(os.fstat(number), os.fstat(aside))
    os.close(number)
    os.close(aside)


PINNED = """
import os
from coslice.gate import GATE
home = os.sched_getaffinity(0)
GATE.configure([min(home)])
GATE.enter()
import coslice.workload
coslice.workload.register(on_snapshot=lambda: None, env={})
from coslice.workload.process import PROCESS
assert PROCESS._mover.cpus == home, PROCESS._mover.cpus
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="pinning shows only where there are two cores")
def test_who_loads_us_inside_a_section_has_its_state_moved_outside_of_the_accelerators_cores() -> None:
    done = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("parked", [False, True])
def test_a_process_with_an_open_channel_ends_by_itself(parked: bool, tmp_path: Path) -> None:
    with FakeAgent(tmp_path) as agent:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys, torch\n"
                "from coslice.workload import register\n"
                "env = {'COSLICE_AGENT': sys.argv[1], 'COSLICE_JOB': 'j'}\n"
                "handle = register(torch.nn.Linear(64, 64), env=env)\n"
                "sys.stdin.readline()\n",
                agent.address,
            ],
            stdin=subprocess.PIPE,
            text=True,
        )
        stream = agent.stream()
        if parked:
            stream.move_out("op/out")
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
        assert stream.over.wait(60)
