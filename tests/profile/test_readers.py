"""Readers: the means of the raw lines, nothing dropped without saying so, foreign files refused."""

import json
import re
from pathlib import Path

import profile_samples as samples
import pytest

from coslice.errors import ConfigError
from coslice.profile.model import Pool, Profile
from coslice.profile.options import ReadOptions
from coslice.profile.read import read_all, read_profiles


def read(tmp_path: Path, text: str, *, name: str = "run.log", **options: object) -> Profile:
    file = tmp_path / name
    file.write_text(text)
    (found,) = read_profiles(file, ReadOptions(**options))  # type: ignore[arg-type]
    source = found.source
    assert source.used + sum(source.skipped.values()) == source.read, (
        "a line is neither used nor accounted for"
    )
    return found


def means(pool: Pool) -> dict[str, float]:
    return {phase.name: round(phase.mean, 9) for phase in pool.phases}


# ── veRL ───────────────────────────────────────────────────────────────────


def test_a_fully_async_log_has_a_trainer_and_a_sampler(tmp_path: Path) -> None:
    found = read(tmp_path, samples.verl_async_log())
    trainer, sampler = found.pool("trainer"), found.pool("sampler")
    assert means(trainer)["gen"] == 32.5
    assert means(trainer)["update_actor"] == 55.0
    assert trainer.period.mean == pytest.approx(92.5, abs=0.02)
    assert [phase.on for phase in trainer.phases if phase.name in ("gen", "update_actor")] == [False, True]
    assert (trainer.coupling, trainer.staleness) == ("buffered", 2.0)
    assert trainer.state_bytes == int(24.5 * (1 << 30))
    assert sampler.duty == pytest.approx(62.5 / 82.5)
    assert sum(found.source.skipped.values()) == 7  # 5 of parameter sync, the start-up, a foreign line


def test_a_colocated_log_is_idle_only_for_rewards(tmp_path: Path) -> None:
    found = read(tmp_path, samples.verl_colocated_log())
    (pool,) = found.pools
    assert pool.role == "both"
    assert means(pool)["gen"] == 103.0
    assert pool.duty == pytest.approx(1 - 20.0 / 149.1, abs=1e-6)
    assert any("generate_sequences" in note for note in found.source.notes)  # within gen: not counted twice


def test_the_json_lines_of_verl(tmp_path: Path) -> None:
    (pool,) = read(tmp_path, samples.verl_json_log()).pools
    assert pool.period.mean == pytest.approx(15.5)


def test_lines_that_come_twice_count_once(tmp_path: Path) -> None:
    log = samples.verl_colocated_log()
    found = read(tmp_path, log + log)
    assert found.pools[0].period.count == 5
    assert found.source.skipped == {"repeated lines": 5}


def test_the_person_may_know_better(tmp_path: Path) -> None:
    (pool,) = read(tmp_path, samples.verl_colocated_log(), shape="disaggregated", staleness=1.0).pools
    assert (pool.role, pool.coupling, pool.staleness) == ("trainer", "buffered", 1.0)
    assert pool.duty == pytest.approx(26.1 / 149.1)


def test_a_verl_log_without_times(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no line has the times"):
        read(tmp_path, "step:1 - actor/loss:0.1\ntiming_s/param_sync: 2 seconds\n")


# ── step files ─────────────────────────────────────────────────────────────


def test_a_step_file_with_its_index(tmp_path: Path) -> None:
    index = [{"file": "a.jsonl", "gpus": "4 trainer + 4 sampler H100", "mode": "disaggregated, staleness 8"}]
    (tmp_path / "index.json").write_text(json.dumps(index))
    (pool,) = read(tmp_path, samples.step_file(), name="a.jsonl").pools
    assert (pool.accelerators, pool.staleness, pool.coupling) == (4, 8.0, "buffered")
    assert means(pool)["gen"] == 43.0
    assert pool.duty == pytest.approx(62.0 / 105.0)


def test_without_an_index_off_time_is_closed_and_it_says_so(tmp_path: Path) -> None:
    found = read(tmp_path, samples.step_file(), name="a.jsonl")
    assert found.pools[0].coupling == "closed"
    assert any("--staleness" in note for note in found.source.notes)


def test_broken_lines_of_a_step_file_are_counted(tmp_path: Path) -> None:
    found = read(tmp_path, samples.step_file() + "{not json\n" + '{"step": 9}\n', name="a.jsonl")
    assert found.source.skipped == {"not a JSON object": 1, "no times": 1}
    assert found.source.used == 5


# ── TRL ────────────────────────────────────────────────────────────────────


def test_a_trainer_state_with_profiling(tmp_path: Path) -> None:
    found = read(tmp_path, samples.trainer_state(), name="trainer_state.json")
    (pool,) = found.pools
    assert pool.period.mean == pytest.approx(32.5)
    assert pool.duty == pytest.approx(1 - 6.0 / 32.5)  # colocated: only rewards leave the GPU idle
    assert found.source.skipped == {"evaluations": 1, "the summary at the end": 1}


def test_a_trainer_with_a_server_of_its_own(tmp_path: Path) -> None:
    (pool,) = read(tmp_path, samples.trainer_state(), name="s.json", shape="disaggregated").pools
    assert pool.duty == pytest.approx(1 - 18.0 / 32.5)


def test_a_trainer_state_without_profiling_says_what_it_cannot(tmp_path: Path) -> None:
    found = read(tmp_path, samples.trainer_state(profiled=False), name="s.json")
    assert found.pools[0].duty == 1.0
    assert any("not what is idle in it" in note for note in found.source.notes)


def test_a_trainer_state_without_times(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="step_time"):
        read(tmp_path, json.dumps({"log_history": [{"step": 1, "loss": 1.0}]}), name="s.json")


# ── utilisation ────────────────────────────────────────────────────────────


def test_blocks_of_an_nvidia_smi_record(tmp_path: Path) -> None:
    found = read(tmp_path, samples.utilization_csv(), name="gpus.csv", roles={"0": "trainer", "1": "sampler"})
    trainer, sampler = found.pool("trainer"), found.pool("sampler")
    assert trainer.busy.mean == pytest.approx(20.0, abs=0.6)  # the gap of 2 s is joined
    assert trainer.period.mean == pytest.approx(50.0, abs=0.6)
    assert sampler.busy.mean == pytest.approx(30.0, abs=0.6)
    assert trainer.device_bytes == 40000 << 20


def test_thresholds_change_what_a_block_is(tmp_path: Path) -> None:
    found = read(tmp_path, samples.utilization_csv(), name="gpus.csv", join_s=1.0)
    assert found.pool("gpu0").period.mean == pytest.approx(25.0, abs=1.0)  # two blocks now, not joined


@pytest.mark.parametrize("interval", [0.1, 2.0])
def test_any_interval(tmp_path: Path, interval: float) -> None:
    found = read(tmp_path, samples.utilization_csv(interval=interval, cycles=6), name="gpus.csv")
    assert found.pool("gpu0").duty == pytest.approx(0.4, abs=0.03)


def test_gpus_that_work_together_are_one_pool(tmp_path: Path) -> None:
    lines = samples.utilization_csv().splitlines()
    twin = [re.sub(r", 0, ", ", 2, ", line) for line in lines if ", 0, " in line]
    found = read(tmp_path, "\n".join(lines + twin) + "\n", name="gpus.csv")
    assert [pool.accelerators for pool in found.pools] == [2, 1]


def test_dcgm_has_no_time_stamps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--interval-s"):
        read(tmp_path, samples.dcgm_table(), name="dcgm.txt")
    found = read(tmp_path, samples.dcgm_table(), name="dcgm.txt", interval_s=1.0)
    assert found.pools[0].duty == pytest.approx(15 / 40, abs=0.02)


def test_a_gpu_that_is_always_busy_is_no_pool_but_is_told(tmp_path: Path) -> None:
    lines = ["timestamp_ms,gpu_index,gpu_util_pct"]
    for number in range(600):
        lines += [f"{number * 500},0,{80 if number % 100 > 40 else 0}", f"{number * 500},1,99"]
    found = read(tmp_path, "\n".join(lines) + "\n", name="g.csv")
    assert [pool.label for pool in found.pools] == ["gpu0"]
    assert any("gpu1" in note and "100.0%" in note for note in found.source.notes)


# ── files ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        "hello\n",
        '{"a": 1}\n',
        "a,b\n1,2\n",
        "the columns are timestamp_ms, gpu_index, gpu_util_pct\n",
        "\x00\x01\x02",
        "[]",
        "{",
    ],
)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "foreign.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"foreign\.txt.*Known are"):
        read_profiles(file)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="empty"):
        read_profiles(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot read"):
        read_profiles(tmp_path / "none")


def test_names_of_several_files_differ(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.log").write_text(samples.verl_colocated_log())
    found = read_all([tmp_path / "a" / "train.log", tmp_path / "b" / "train.log"])
    assert [profile.name for profile in found] == ["train", "train-2"]
