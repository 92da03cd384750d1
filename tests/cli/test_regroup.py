"""A groups file that changes while ``coslice up`` runs: SIGHUP, with a real process."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.conftest import COSLICE, ENVIRONMENT, TWO_CORES

import coslice
from coslice.cli.plan import groups_given
from coslice.cli.regroup import _with_devices_of
from coslice.cli.rpc import group_status
from coslice.cli.up import run_agent
from coslice.cli.up_config import UpOptions, group_config
from coslice.errors import ConfigError
from coslice.wire.v1 import coslice_pb2 as pb

BOUND = 60.0
BASE = '[[groups]]\nname = "{}"\ncpus = [{}]\nmemory = "16MiB"\n'


class Up:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "groups.toml"
        self.folder, self.process = folder, None

    def start(self, what: str = "up") -> None:
        command = [*COSLICE, what, "--json", "--listen", "127.0.0.1:0"]
        command += ["--state", str(self.folder / "state"), "--groups", str(self.file)]
        command += ["--agent-listen", "127.0.0.1:0", "--device", "host"] if what == "up" else []
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=ENVIRONMENT, **pipes)
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["orchestrator"]

    def write(self, *groups: str) -> None:
        self.file.write_text("\n".join(groups))

    def hang_up(self) -> list[str]:
        """The lines of the log about it; the last says what was done, or why nothing was."""
        assert self.process is not None
        assert self.process.stderr is not None
        self.process.send_signal(signal.SIGHUP)
        lines = []
        for line in self.process.stderr:
            if "SIGHUP" in line:
                lines.append(line.partition("SIGHUP: ")[2].strip())
                if lines[-1].startswith("read again"):
                    return lines
        raise AssertionError(f"it ended: {lines}")

    def groups(self) -> dict[str, pb.GroupStatus]:
        return {group.group: group for group in group_status(self.address).groups}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    made = Up(tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.communicate()


def test_a_separate_orchestrator_keeps_what_the_file_says_of_policies(up: Up) -> None:
    nodes = 'nodes = ["n0", "n1"]\n'
    up.write(BASE.format("one", 0) + nodes + 'policy = "fifo"\nadmission = "warn"\n')
    up.start("orchestrator")
    assert [(name, one.policy, one.admission.mode) for name, one in up.groups().items()] == [
        ("one", "fifo", "warn")
    ]
    up.write(BASE.format("two", 0) + nodes, BASE.format("one", 1) + nodes + 'policy = "least_recent"\n')
    assert "group two is new" in up.hang_up()[-1]
    assert {name: one.policy for name, one in up.groups().items()} == {
        "one": "least_recent",
        "two": "fair_share",
    }
    up.write('[[groups]]\nname = "two"\npolicy = "nonsense"\n')
    assert up.hang_up()[0].startswith("groups are as before: ")
    assert up.groups()["two"].policy == "fair_share"


@pytest.mark.parametrize("said", ["policy=fifo", "admission=warn", "max_slowdown=1.2"])
def test_an_agent_says_whose_a_policy_is(said: str) -> None:
    with pytest.raises(ConfigError, match="that is the orchestrator's"):
        run_agent(UpOptions(groups=(f"one:memory=16MiB:{said}",), device="host", node="n0"))


@TWO_CORES
def test_groups_come_change_and_go_but_for_those_in_use(up: Up) -> None:
    up.write(BASE.format("one", 0), BASE.format("two", 1))
    up.start()
    with coslice.Client(up.address, job="job-a", groups="one") as a:
        a.acquire(timeout=BOUND)
        up.write(BASE.format("three", 1) + 'policy = "fifo"\n', BASE.format("four", 0))
        lines = up.hang_up()
        assert (
            lines[0]
            == f"group one is not in {up.file} any more, and stays: group one is in use: job-a holds it"
        )
        assert lines[1].startswith("group four is not opened: groups one and four both want core 0")
        assert "group two is deleted, group three is new" in lines[2]
        groups = up.groups()
        assert sorted(groups) == ["one", "three"]
        assert groups["three"].policy == "fifo"
        a.yield_()
        a.acquire("three", timeout=BOUND)
        up.file.write_text("[[groups]]\n")
        assert up.hang_up()[0].startswith(f"groups are as before: {up.file}: not a groups file")
        for wrong, says in (
            ((BASE.format("three", 0), BASE.format("three", 1)), "a group is named twice"),
            ((BASE.format("three", 4095),), "no such core: [4095]"),
        ):
            up.write(*wrong)
            assert up.hang_up()[0].startswith(f"groups are as before: {says}")
        a.yield_("three")
    up.write(BASE.format("three", 1) + 'policy = "priority:class/job-a=1"\nadmission = "warn"\n')
    (line,) = up.hang_up()
    assert "group one is deleted, group three: policy is priority:class/job-a=1, admission is warn" in line
    groups = up.groups()
    assert sorted(groups) == ["three"]
    assert groups["three"].policy == "priority:class/job-a=1"
    assert groups["three"].admission.mode == "warn"


def test_who_was_given_a_core_keeps_it_when_the_file_is_read_again(up: Up) -> None:
    """A group that comes later takes none of those that nobody named in the file."""
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    free = '[[groups]]\nname = "{}"\nmemory = "16MiB"\n'
    up.write(free.format("one"), free.format("two"))
    up.start()
    up.write(free.format("two"), free.format("three"))
    assert "group one is deleted, group three is new" in up.hang_up()[-1]
    assert sorted(up.groups()) == ["three", "two"]


def test_cores_and_memory_stay_until_the_next_start() -> None:
    old = "one:cpus=0,1:memory=1MiB:admission=warn"
    new = "one:cpus=2:memory=2MiB:max_slowdown=1.5:policy=priority:class/job-a=1"
    kept = _with_devices_of(old, new)
    assert kept == "one:cpus=0,1:memory=1MiB:max_slowdown=1.5:policy=priority:class/job-a=1"
    assert _with_devices_of(None, new) == new
    assert group_config(kept, UpOptions(), "fifo").policy == "priority:class/job-a=1"


def test_a_policy_of_its_own_is_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "groups.toml"
    file.write_text(BASE.format("one", 0) + 'policy = "fair_share:weight/job-a=2"\n')
    assert groups_given(None, file) == ("one:cpus=0:memory=16MiB:policy=fair_share:weight/job-a=2",)
