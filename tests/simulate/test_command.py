"""``coslice simulate`` and ``coslice bench sim``, as users and scripts call them."""

import json
import multiprocessing
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import profile_samples as samples
import pytest
from typer.testing import CliRunner

from coslice.cli.bench_sim import bench_sim, parts_of
from coslice.cli.main import app
from coslice.errors import ConfigError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def steps(path: Path, *, on: float, off: float, count: int = 12) -> str:
    lines = [
        {
            "step": k,
            "gen_s": off,
            "reward_s": 0.0,
            "update_actor_s": on,
            "step_s": on + off,
            "param_sync_s": 0,
        }
        for k in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_figures_for_scripts(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    run("a=40/60", "b=30/70", "--policy", "fifo", "--swap-s", "2", "--json", str(out))
    told = json.loads(out.read_text())
    assert set(told["slowdown"]) == {"a", "b"}
    assert told["duty_bound"] == pytest.approx(0.7, abs=0.01)
    assert 0.65 < told["useful_duty"] <= 0.71
    assert told["swaps"] > 100
    assert told["wait_s"]["max"] >= told["wait_s"]["p90"] >= 0
    assert told["steps_per_s"] > 0
    assert told["processes"] == 1
    assert told["policy"] == "fifo"


def test_jobs_from_files_and_from_two_figures_together(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    log = steps(tmp_path / "math.jsonl", on=40.0, off=60.0)
    run(log, "code=20/80", "--json", str(out))
    told = json.loads(out.read_text())
    assert told["jobs"]["math"]["solo_step_s"] == pytest.approx(100.0)
    assert told["jobs"]["code"]["solo_step_s"] == pytest.approx(100.0)


def test_of_a_job_with_several_pools_it_is_said_which_one_is_played(tmp_path: Path) -> None:
    (tmp_path / "async.log").write_text(samples.verl_async_log())
    said = " ".join(run(str(tmp_path / "async.log"), "code=20/80").split())
    assert "the first is played: async (trainer, not sampler);" in said


def test_policies_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    said = run("a=25/60", "b=216/127", "--compare", "fifo,shortest,reservation", "--json", str(out))
    told = json.loads(out.read_text())["policies"]
    assert list(told) == ["fifo", "shortest", "reservation"]
    for name in told:
        assert name in said
    assert told["reservation"]["slowdown"]["a"] < told["fifo"]["slowdown"]["a"]


def test_what_is_drawn(tmp_path: Path) -> None:
    journal, page, trace = (tmp_path / name for name in ("j.jsonl", "r.html", "t.json"))
    run(
        "a=4/6",
        "b=3/7",
        "--hours",
        "0.05",
        "--journal",
        str(journal),
        "--replay",
        str(page),
        "--perfetto",
        str(trace),
    )
    assert "coslice_journal" in journal.read_text().splitlines()[0]
    assert "<svg" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_scenario_file(tmp_path: Path) -> None:
    step = [
        {"seconds": 30.0, "group": "samplers", "name": "generate"},
        {"seconds": 20.0, "group": "trainers", "name": "train"},
    ]
    scenario = {
        "pools": [{"name": "samplers"}, {"name": "trainers", "gpus": 4}],
        "jobs": [{"name": name, "loop": [step], "steps": 30} for name in ("a", "b")],
        "cost": {"out_s": 1.0, "in_s": 1.0},
    }
    path, out = tmp_path / "scenario.json", tmp_path / "figures.json"
    path.write_text(json.dumps(scenario))
    run("--scenario", str(path), "--json", str(out))
    told = json.loads(out.read_text())
    assert set(told["groups"]) == {"samplers", "trainers"}
    assert {job["steps"] for job in told["jobs"].values()} == {30}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "nothing to simulate"),
        (("a=1/2", "--policy", "lifo"), "'lifo' is not a policy"),
        (("a=1/2", "--compare", "fifo,lifo"), "'lifo' is not a policy"),
        (("a=0/2",), "ON is above 0"),
        (("a=x/2",), "NAME=ON/OFF"),
        (("_a=1/2",), "NAME=ON/OFF"),
        (("missing.log",), "cannot read missing.log"),
        (("a=1/2", "--fault", "meteors=2"), "known are crashes"),
        (("a=1/2", "--fault", "crashes=many"), "not a number"),
        (("a=1/2", "--hours", "0"), "above 0"),
        (("a=1/2", "--hours", "nan"), "--hours nan"),
        (("a=1/2", "--hours", "inf"), "--hours inf"),
        (("a=1/2", "--staleness", "nan"), "--staleness nan"),
        (("a=1/2", "--swap-s", "1e300"), "--swap-s"),
        (("a=1/2", "--compare", ","), "'' is not a policy"),
        (("a=1/2", "--fault", "failed_moves=2"), "failed_moves 2: a number from 0 to 1"),
        (("a=1e-9/0", "b=10/10"), "a has a step that takes no time"),
        (("a=1e-5/0", "b=10/10"), "too many to play .*4e[+]08 of them of a"),
        (("a=9/9", "--drift", "a:10:1e-12"), "too many to play"),
        (("a=9/9", "--hours", "100000", "--fault", "crashes=3600"), "3.6e[+]08 faults"),
        (("a=1/2", "--max-slowdown", "1.2"), "--max-slowdown and --declared are of --admission"),
        (("a=1/2", "--declared"), "--max-slowdown and --declared are of --admission"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        CliRunner().invoke(
            app,
            ["simulate", "--", *arguments] if arguments[:1] == ("-a=1/2",) else ["simulate", *arguments],
            catch_exceptions=False,
        )


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("polcy", "fifo", "there is no field 'polcy'"),
        ("jobs.0.step", 5, "jobs: there is no field 'step'"),
        ("jobs.0.loop.0.0.second", 5, "loop: there is no field 'second'"),
        ("policy", "lifo", "'lifo' is not a policy"),
        ("pools.0.policy", "lifo", "'lifo' is not a policy"),
        ("pools.0.nodes", 0, "nodes and gpus are 1 or more"),
        ("pools.0.name", "a b", "not a pool name"),
        ("jobs.0.name", "../a", "not a job name"),
        ("jobs.0.arrival", -1, "arrival are 0 or more"),
        ("jobs.0.staleness", 1e300, "staleness is 0 or more"),
        ("cost", {"out_rate": 0}, "rates are bytes a second"),
        ("cost", {"in_s": -1}, "cost: seconds"),
        ("faults", {"crashes": -1}, "numbers per hour"),
        ("faults", {"failed_moves": 2}, "a share from 0 to 1"),
        ("until", -5, "until and warmup"),
        ("warmup", 1e8, "before the warmup of 1e"),
        ("max_hold", 0, "max_hold"),
        ("jobs", [], "there is no job"),
        ("jobs.0.loop.0.0.seconds", 1e-9, "a step that takes no time"),
        ("jobs.0.steps", 10**9, "1e[+]09 steps are too many to play"),
    ],
)
def test_a_scenario_that_cannot_be(tmp_path: Path, where: str, value: object, error: str) -> None:
    """It used to hang, to end in a traceback or to be simulated as something else."""
    scenario: dict[str, Any] = {
        "pools": [{"name": "p"}],
        "jobs": [{"name": "a", "steps": 3, "loop": [[{"seconds": 5, "group": "p"}]]}],
    }
    *folders, last = where.split(".")
    spot: Any = scenario
    for name in folders:
        spot = spot[int(name) if name.isdigit() else name]
    spot[last] = value
    path = tmp_path / "s.json"
    path.write_text(json.dumps(scenario))
    with pytest.raises(ConfigError, match=error):
        run("--scenario", str(path))


def written(path: Path, **more: object) -> str:
    job = {"name": "a", "steps": 3, "loop": [[{"seconds": 5, "group": "p"}]]}
    path.write_text(json.dumps({"pools": [{"name": "p"}], "jobs": [job], **more}))
    return str(path)


def test_of_a_job_with_batches_some_may_be_ready_at_once_and_some_steps_take_no_time(tmp_path: Path) -> None:
    """Only on the average a step has to last."""
    train = {"name": "a", "loop": [[{"seconds": s, "group": "p"}] for s in (0, 5)]}
    for made in (3, 0):
        job = {**train, "produce": [[{"seconds": made}], [{"seconds": 0}]]}
        run("--scenario", written(tmp_path / "s.json", jobs=[job], until=100))
    for loop, error in (([[{"seconds": 0, "group": "p"}]], "a step that takes no time"), ([], "empty step")):
        job = {"name": "a", "loop": loop, "produce": [[{"seconds": 0, "group": "p"}]]}
        with pytest.raises(ConfigError, match=error):
            run("--scenario", written(tmp_path / "s.json", jobs=[job], until=100))


def test_what_a_scenario_says_is_not_said_twice(tmp_path: Path) -> None:
    path, out = written(tmp_path / "s.json", policy="shortest"), tmp_path / "out.json"
    with pytest.raises(ConfigError, match="--swap-s, --fault: with --scenario"):
        run("--scenario", path, "--swap-s", "3", "--fault", "crashes=1")
    with pytest.raises(ConfigError, match="--swap-s, --overlap, --staleness: with --scenario"):
        run("--scenario", path, "--swap-s", "0", "--overlap", "0", "--staleness", "0")
    run("--scenario", path, "--json", str(out))
    assert json.loads(out.read_text())["policy"] == "shortest"
    run("--scenario", path, "--policy", "fifo", "--json", str(out))
    assert json.loads(out.read_text())["policy"] == "fifo"


def test_a_policy_that_no_pool_of_the_scenario_would_hear_is_refused(tmp_path: Path) -> None:
    own, other = {"name": "p", "policy": "shortest"}, {"name": "q"}
    path = written(tmp_path / "s.json", pools=[own])
    for option in ("--policy", "--compare"):
        with pytest.raises(ConfigError, match="every pool has one of its own in the file"):
            run("--scenario", path, option, "fifo")
    told = run("--scenario", written(tmp_path / "s.json", pools=[own, other]), "--policy", "fifo")
    assert "these pools keep the policy that the file gives them: p (shortest)" in told


def test_a_time_and_a_seed_go_before_those_of_the_scenario(tmp_path: Path) -> None:
    job = {"name": "a", "loop": [[{"seconds": 5, "group": "p"}]]}
    more = {"jobs": [job], "faults": {"crashes": 60}, "until": 3600, "warmup": 60, "seed": 5}
    path, out = written(tmp_path / "s.json", **more), tmp_path / "out.json"
    for hours, error in (("0", "--hours 0: give a time above 0"), ("0.01", "warmup takes 60 s")):
        with pytest.raises(ConfigError, match=error):
            run("--scenario", path, "--hours", hours)
    starts = {}
    for seed in ("5", "0", ""):
        run("--scenario", path, *(("--seed", seed) if seed else ()), "--json", str(out))
        starts[seed] = json.loads(out.read_text())["jobs"]["a"]["starts"]
    assert starts[""] == starts["5"] != starts["0"]


def test_a_time_too_short_for_any_step_has_no_savings(tmp_path: Path) -> None:
    told = run("a=10/10", "--hours", "0.001")
    assert "no job finished a whole step in that time" in told
    assert "saved" not in told


def test_a_journal_takes_the_place_of_a_file_and_of_nothing_else(tmp_path: Path) -> None:
    """It used to remove what was there: ``--journal /dev/null``, as root, the device."""
    file, pipe, link = tmp_path / "j.jsonl", tmp_path / "pipe", tmp_path / "link"
    file.write_text("older")
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path, why in ((pipe, " is no plain file"), (link, " is a link"), (tmp_path, ": Is a directory")):
            with pytest.raises(ConfigError, match=re.escape(f"{path}{why}")):
                run("a=10/10", "--hours", "0.1", "--journal", str(path))
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert file.read_text() == "older"
    run("a=10/10", "--hours", "0.1", "--journal", str(file))
    assert "coslice_journal" in file.read_text().splitlines()[0]


def test_a_foreign_scenario_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    path.write_text('{"pools": 3}')
    with pytest.raises(ConfigError, match="not a scenario"):
        run("--scenario", str(path))


def test_the_bench_says_how_fast_and_with_how_many_processes(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--nodes", "2", "--jobs", "8", "--processes", "2", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "sim", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    told = json.loads(out.read_text())
    assert told["processes"] == 2
    assert told["jobs"] == 8
    assert told["steps_per_s"] > 0
    assert told["core_steps"] > 500
    assert 0 < told["node_steps"] < told["core_steps"]
    assert told["cpu_s"] * told["steps_per_cpu_s"] == pytest.approx(told["core_steps"])


def test_the_bench_takes_a_process_for_each_core_and_no_more_than_have_a_part(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--nodes", "2", "--jobs", "8", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "sim", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(out.read_text())["processes"] == min(2, len(os.sched_getaffinity(0)))


def test_a_bench_that_is_called_off_ends_its_processes_in_the_middle_of_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers: list[multiprocessing.process.BaseProcess] = []
    others = multiprocessing.active_children()

    def interrupted(number: int, count: int) -> None:
        workers.extend(child for child in multiprocessing.active_children() if child not in others)
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr("coslice.cli.bench_sim._say", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench_sim(processes=2, nodes=40, jobs=400, hours=24, out=None)
    for minder in set(threading.enumerate()) - before:
        minder.join()
    assert [worker.exitcode for worker in workers] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("processes", [1, 2, 16])
def test_the_bench_hands_out_the_largest_parts_first_and_little_ones_at_the_end(processes: int) -> None:
    parts = parts_of(processes, nodes=1000, jobs=10_000, hours=1.0)
    played = [(part.seed, node) for part in parts for node in range(part.slice, part.nodes, part.of)]
    assert len(set(played)) == len(played) == 1000
    sizes = [part.nodes / part.of for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 5 or processes == 1


def test_what_admission_would_do_about_a_drift(tmp_path: Path) -> None:
    out, journal = tmp_path / "figures.json", tmp_path / "journal.jsonl"
    drift = ["--drift", "math:3300:1.5", "--hours", "1.7", "--swap-s", "8"]
    files = ["--json", str(out), "--journal", str(journal)]
    said = run("math=40/60", "code=40/60", *drift, "--admission", "enforce", *files)
    told = json.loads(out.read_text())["admission"]
    assert told["within"] >= 0.99
    assert told["replanned_at"] > 3300
    assert told["jobs"]["code"]["queued_s"] > 0
    codes = [one["code"] for one in told["decisions"]]
    assert codes[-2:] == ["drifted", "queued"]
    assert "code: queued for" in said
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["admission"]["code"] for line in lines if "admission" in line] == codes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drift", "math"], "JOB:AT_S:FACTOR"),
        (["--drift", "a:1:two"], "JOB:AT_S:FACTOR"),
        (["--drift", "b:1:2"], "there is no job b"),
        (["--drift", "a:1:2:up"], "neither on nor off"),
        (["--drift", "a:1:-2"], "above 0"),
        (["--admission", "maybe"], "off, warn, enforce"),
    ],
)
def test_a_drift_or_a_mode_that_is_none_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("a=40/60", *words)
