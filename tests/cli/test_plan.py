"""``coslice plan`` as people call it, and the groups file from there to ``coslice up``."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import plan_jobs
import pytest
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

from coslice.cli import up_config
from coslice.cli.main import app
from coslice.cli.plan import groups_given
from coslice.cli.up_config import UpOptions, devices_of, group_config
from coslice.errors import ConfigError
from coslice.plan.cluster import load_cluster
from coslice.plan.groupsfile import group_options, read_groups
from coslice.profile.model import decode_profile, encode_profile

runner = CliRunner()
ROOT = Path(__file__).parents[2]


def call(*arguments: str) -> str:
    result = runner.invoke(app, ["plan", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles"
    folder.mkdir()
    for profile in (
        plan_jobs.job("math", 198, 430, 8),
        plan_jobs.job("code", 281, 619, 8),
        plan_jobs.job("full", 95, 100),
    ):
        (folder / f"{profile.name}.json").write_bytes(encode_profile(profile))
    return folder


def test_files_of_other_systems_begin_with_a_mark(tmp_path: Path) -> None:
    cluster, groups = tmp_path / "cluster.toml", tmp_path / "groups.toml"
    cluster.write_text("nodes = 3\n", encoding="utf-8-sig")
    assert len(load_cluster(cluster).nodes) == 3
    groups.write_text('[[groups]]\nname = "g1"\n', encoding="utf-8-sig")
    assert [group.name for group in read_groups(groups)] == ["g1"]


def test_the_keys_that_scripts_read(profiles: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    call(str(profiles), "--max-slowdown", "1.15", "--swap-s", "10", "--json", str(out))
    told = json.loads(out.read_text())
    assert sorted(map(sorted, told["groups"])) == [["code", "math"], ["full"]]
    assert told["useful_duty"] == pytest.approx((0.914 + 0.95) / 2, abs=0.01)
    assert set(told["slowdown"]) == {"math", "code", "full"}
    assert max(told["slowdown"].values()) <= 1.15
    assert set(told["refused"]) == {"code + full", "full + math"}
    assert told["seconds"] >= 0


def test_json_to_the_terminal_is_nothing_but_json(profiles: Path) -> None:
    assert json.loads(call(str(profiles), "--json", "-"))["method"] == "exact"


def test_the_words_say_who_where_and_why_not(profiles: Path) -> None:
    shown = call(str(profiles))
    for words in (
        "2 accelerators instead of 3",
        "order:",
        "alone: full",
        "code + full: together they would compute",
    ):
        assert words in shown


def test_a_picture_has_a_block_for_every_turn(profiles: Path, tmp_path: Path) -> None:
    call(str(profiles), "--picture", str(tmp_path / "p.svg"))
    tree = ElementTree.parse(tmp_path / "p.svg")
    titles = [element.text or "" for element in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(title.startswith("math") for title in titles) >= 3
    assert sum(title.startswith("code") for title in titles) >= 2
    call(str(profiles), "--picture", str(tmp_path / "p.html"))
    assert "alone: full" in (tmp_path / "p.html").read_text()
    with pytest.raises(ConfigError, match=r"\.svg or \.html"):
        call(str(profiles), "--picture", str(tmp_path / "p.png"))


def test_the_groups_file_goes_to_coslice_up(profiles: Path, tmp_path: Path) -> None:
    out = tmp_path / "groups.toml"
    call(str(profiles), "--out", str(out))
    assert [sorted(group.jobs) for group in read_groups(out)] == [["code", "math"], ["full"]]
    specs = groups_given(None, out)  # one node in the file: this one, whatever it is called
    assert specs == ("g1:max_slowdown=1.1", "g2:max_slowdown=1.1")
    out.write_text('[[groups]]\nname = "a"\ncpus = [0]\nmemory = "64MiB"\nadmission = "warn"\n')
    options = UpOptions(groups=groups_given(None, out), device="host", max_slowdown=1.3)
    devices = devices_of(options)
    assert [(str(d.group), d.cpus, d.device_budget) for d in devices] == [("a", (0,), 64 << 20)]
    group = group_config(options.groups[0], options, "fifo")
    assert (group.id, group.admission, group.max_slowdown) == ("a", "warn", 1.3)


def test_admission_does_not_refuse_what_the_plan_allowed(profiles: Path, tmp_path: Path) -> None:
    """A job with a looser bound of its own: with the common one it would be refused at the door."""
    (tmp_path / "c.toml").write_text("[jobs.math]\nmax_slowdown = 1.5\n")
    out = tmp_path / "groups.toml"
    call(str(profiles), "--cluster", str(tmp_path / "c.toml"), "--out", str(out))
    assert {tuple(sorted(group.jobs)): group.max_slowdown for group in read_groups(out)} == {
        ("code", "math"): 1.5,
        ("full",): 1.1,
    }
    assert "Bounds: " in out.read_text()
    assert "math 1.5" in out.read_text()


def test_several_groups_of_a_plan_start_on_one_machine(
    profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in docs/planning.md, with no word on cores in it: each gets one, and its part of the memory."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(up_config, "_available_memory", lambda: 48 << 30)
    out = tmp_path / "groups.toml"
    call(str(profiles), "--out", str(out))
    options = UpOptions(groups=groups_given(None, out), groups_file=out, device="host")
    assert [(d.cpus, d.device_budget) for d in devices_of(options)] == [((2,), 6 << 30), ((1,), 6 << 30)]
    named = UpOptions(groups=("a", "b:cpus=2", "c"), device="host")
    assert [d.cpus for d in devices_of(named)] == [(1,), (2,), (0,)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(ConfigError, match=r"g2: no core .* with cpus = \[1, 2\] in .*groups\.toml"):
        devices_of(options)


def test_each_node_takes_its_groups(tmp_path: Path) -> None:
    path = tmp_path / "groups.toml"
    path.write_text('[[groups]]\nname = "a"\nnodes = ["n1"]\n[[groups]]\nname = "b"\nnodes = ["n1", "n2"]\n')
    assert group_options(path, "n1") == ["a", "b"]
    assert group_options(path, "n2") == ["b"]
    with pytest.raises(ConfigError, match=r"n1, n2.*this is other"):
        group_options(path, "other")
    with pytest.raises(ConfigError, match="--group and --groups"):
        groups_given(["a"], path)


@pytest.mark.parametrize(
    "text", ["nonsense", "groups = []", '[[groups]]\nnom = "a"', '[[groups]]\nname = "a b"']
)
def test_a_foreign_groups_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "g.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"g\.toml"):
        read_groups(tmp_path / "g.toml")


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('nodes = 3\nhost_memory = "1TB"\nswap_bandwidth = "20GB"\n[jobs.a]\nmax_slowdown = 1.5\n')
    cluster = load_cluster(path)
    assert cluster.nodes == ("node1", "node2", "node3")
    assert (cluster.host_memory, cluster.swap_bandwidth) == (10**12, 20 * 10**9)
    assert cluster.jobs["a"].max_slowdown == 1.5
    assert load_cluster(path, swap_s=3.0).swap_s == 3.0
    assert load_cluster(path, swap_s=3.0).swap_bandwidth == 0
    (tmp_path / "c.json").write_text('{"nodes": ["x"]}')
    assert load_cluster(tmp_path / "c.json").nodes == ("x",)
    path.write_text("gpus = 3\n")
    with pytest.raises(ConfigError, match="gpus_per_node"):
        load_cluster(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes = -1", "nodes = -1"),
        ("nodes = 1000000000", "nodes = 1000000000"),
        ('nodes = ["a", "b", "a"]', "a is named twice"),
        ('nodes = ["gpu a"]', "not a node name"),
        ("device_memory = -1", "device_memory = -1"),
        ('host_memory = "lots"', "not a size"),
        ("swap_s = nan", "swap_s = nan"),
        ("[jobs.a]\nmax_slowdown = 0.5", "max_slowdown of a = 0.5"),
        ("[jobs.a]\nmax_slowdown = nan", "max_slowdown of a = nan"),
    ],
)
def test_a_cluster_that_cannot_be(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"c\.toml: .*{says}"):
        load_cluster(tmp_path / "c.toml")


def test_pools_that_share_are_named_by_role_too_and_exist(profiles: Path) -> None:
    assert "1 shared groups" in call(str(profiles), "--share", "trainer")
    named = decode_profile((profiles / "math.json").read_bytes())
    pools = (replace(named.pools[0], name="gpu0"),)
    (profiles / "math.json").write_bytes(encode_profile(replace(named, pools=pools)))
    assert "1 shared groups" in call(str(profiles), "--share", "trainer")  # gpu0 is one
    with pytest.raises(ConfigError, match=r"--share sampler: .*there are: gpu0, trainer"):
        call(str(profiles), "--share", "sampler")
    with pytest.raises(ConfigError, match="--swap-s inf"):
        call(str(profiles), "--swap-s", "inf")


def test_swaps_by_bytes(tmp_path: Path) -> None:
    pool = replace(plan_jobs.job("a", 1, 2).pools[0], state_bytes=40 * 10**9)
    (tmp_path / "c.toml").write_text('swap_bandwidth = "20GB"\n')
    assert load_cluster(tmp_path / "c.toml").move_s(pool) == 2.0
    assert load_cluster(tmp_path / "c.toml").move_s(replace(pool, state_bytes=0)) == 5.0


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no profile"):
        call(str(tmp_path))


def test_a_foreign_file_in_a_folder_is_told_beside_the_answer(profiles: Path) -> None:
    (profiles / "index.json").write_text("[]")
    result = runner.invoke(app, ["plan", str(profiles), "--json", "-"], catch_exceptions=False)
    assert len(json.loads(result.stdout)["slowdown"]) == 3
    assert "only its profiles are taken, not index.json" in result.stderr


def test_the_files_are_there_although_nobody_reads_the_screen_to_its_end(
    profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``coslice plan … --out groups.toml | head -1`` wrote no groups file."""

    def left(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Console, "print", left)  # no function of ours: a module loaded now would keep it
    files = {"--json": tmp_path / "plan.json", "--out": tmp_path / "g.toml", "--picture": tmp_path / "p.svg"}
    with pytest.raises(BrokenPipeError):
        call(str(profiles), *(word for option, file in files.items() for word in (option, str(file))))
    assert all(file.stat().st_size for file in files.values())


def test_the_example(tmp_path: Path) -> None:
    """As its page says, with the real command."""
    command = shutil.which("coslice", path=str(Path(__import__("sys").executable).parent))
    assert command is not None
    subprocess.run(
        [str(ROOT / "examples/plan/make_profiles.sh"), str(tmp_path / "profiles")],
        check=True,
        env={"PATH": f"{Path(command).parent}:/usr/bin:/bin"},
    )
    shown = call(
        str(tmp_path / "profiles"),
        "--cluster",
        str(ROOT / "examples/plan/cluster.toml"),
        "--max-slowdown",
        "1.15",
        "--out",
        str(tmp_path / "groups.toml"),
    )
    assert "6 accelerators instead of 11" in shown
    assert len(group_options(tmp_path / "groups.toml", "any")) == 3  # one node, so that coslice up takes them
