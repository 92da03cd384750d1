"""Slurm: host lists expand as scontrol does, and a step's variables say node, group and orchestrator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from coslice.agent.topology.hostlist import expand
from coslice.agent.topology.slurm import step_of
from coslice.cli.main import app
from coslice.cli.up_config import UpOptions
from coslice.errors import ConfigError

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z-]", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("login", ("login",)),
        ("gpu[01-03,7],login", ("gpu01", "gpu02", "gpu03", "gpu7", "login")),
        ("gpu[9-11]", ("gpu9", "gpu10", "gpu11")),
        ("gpu[099-101]", ("gpu099", "gpu100", "gpu101")),
        ("r[1-2]n[0-1]", ("r1n0", "r1n1", "r2n0", "r2n1")),
        ("n[1-2].example.org", ("n1.example.org", "n2.example.org")),
    ],
)
def test_lists_expand(text: str, hosts: tuple[str, ...]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["gpu[1-3", "gpu1-3]", "gpu[]", "gpu[3-1]", "gpu[a-b]", "a,,b", ",a", "a b", "n[0-99999999]", "n[1-[2]]"],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no list of hosts|names more than"):
        expand(text)


@settings(max_examples=40)
@given(NAMES, st.integers(0, 10**6), st.integers(0, 50), st.integers(1, 8))
def test_a_range_is_its_numbers_with_the_width_of_the_first(
    name: str, low: int, count: int, width: int
) -> None:
    first, last = str(low).zfill(width), str(low + count)
    hosts = expand(f"{name}[{first}-{last}]")
    assert [int(host.removeprefix(name)) for host in hosts] == list(range(low, low + count + 1))
    assert all(len(host) - len(name) >= len(first) for host in hosts)


@settings(max_examples=40)
@given(st.lists(NAMES, min_size=1, max_size=5))
def test_names_without_brackets_stay_as_they_are(names: list[str]) -> None:
    assert expand(",".join(names)) == tuple(names)


@settings(max_examples=40)
@given(st.text("ab1[]-,", max_size=14))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except ValueError:
        return
    assert all(host and not set("[],") & set(host) for host in hosts)


STEP = {
    "SLURM_JOB_ID": "77",
    "SLURMD_NODENAME": "gpu02",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_STEP_GPUS": "0,1",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


def test_a_step_says_node_group_and_orchestrator() -> None:
    step = step_of(STEP)
    assert (step.node, step.nodes, step.group) == ("gpu02", ("gpu01", "gpu02"), "slurm-77")
    assert (step.orchestrator, step.gpus) == ("gpu01:50051", 2)
    step = step_of({**STEP, "COSLICE_GROUP": "train", "COSLICE_ORCHESTRATOR": "head:50051"})
    assert (step.group, step.orchestrator) == ("train", "head:50051")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURMD_NODENAME": ""}, "srun"),
        ({"SLURM_JOB_ID": ""}, "srun"),
        ({"SLURMD_NODENAME": "gpu09"}, "not one of"),
        ({"SLURM_JOB_NODELIST": "gpu[1"}, "SLURM_JOB_NODELIST"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_no_usable_step_is_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        step_of({**STEP, **change})


def test_the_agent_takes_node_group_and_orchestrator_from_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line says goes first."""
    seen: list[UpOptions] = []
    monkeypatch.setattr("coslice.cli.up.run_agent", seen.append)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    command = ["agent", "--topology", "slurm"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert CliRunner().invoke(app, [*command, "-g", "x", "-o", "head:50051", "--node", "n"]).exit_code == 0
    assert [(o.node, o.groups, o.listen, o.topology) for o in seen] == [
        ("gpu02", ("slurm-77",), "gpu01:50051", None),
        ("n", ("x",), "head:50051", None),
    ]
