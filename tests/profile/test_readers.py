"""Readers: the means of the raw lines, nothing dropped without saying so, foreign files refused."""

import gzip
import json
import random
import re
from pathlib import Path

import profile_samples as samples
import pytest

from coslice.errors import ConfigError
from coslice.profile.model import Pool, Profile, decode_profile, encode_profile
from coslice.profile.options import ReadOptions
from coslice.profile.read import read_all, read_profiles
from coslice.profile.steps import NO_TIME


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


def test_a_time_of_a_verl_log_that_is_none(tmp_path: Path) -> None:
    log = samples.verl_colocated_log()
    wrong = [
        "step:7 - timing_s/gen:nan - timing_s/update_actor:18.0 - timing_s/step:140.0",
        "step:8 - timing_s/gen:lots - timing_s/update_actor:18.0 - timing_s/step:140.0",
        "step:9 - timing_s/gen:1e300 - timing_s/update_actor:18.0 - timing_s/step:1e300",
    ]
    found = read(tmp_path, log + "\n".join(wrong) + "\n")
    assert found.source.skipped == {NO_TIME: 3}
    assert found.pools == read(tmp_path, log).pools


def test_a_part_of_a_timer_may_be_no_number(tmp_path: Path) -> None:
    """The mean over no tool call is none; the step is as good as any."""
    log = samples.verl_colocated_log().replace("generate_sequences:99.0", "agent_loop/tool_calls/mean:nan")
    assert read(tmp_path, log).source.used == 5


def test_a_log_of_the_first_versions(tmp_path: Path) -> None:
    """``timing/``, and nothing about the step as a whole."""
    lines = [
        f"step:{n} - timing/gen:{20 + n} - timing/ref:4.5 - timing/update_actor:20.0" for n in range(1, 4)
    ]
    found = read(tmp_path, "\n".join(lines))
    assert means(found.pools[0]) == {"gen": 22.0, "ref": 4.5, "update_actor": 20.0}
    assert any("no time of a whole step" in note for note in found.source.notes)


def test_what_ray_adds_to_a_line_is_no_part_of_it(tmp_path: Path) -> None:
    text = samples.verl_colocated_log().replace(" - perf/max_memory_allocated_gb:33.0", "")
    repeated = text.replace("\n", "\x1b[32m [repeated 2x across cluster] (Ray deduplicates logs)\x1b[0m\n")
    assert read(tmp_path, repeated).pools == read(tmp_path, text).pools


def test_lines_that_are_wrapped_are_told(tmp_path: Path) -> None:
    """A terminal's, in a notebook: the times behind the break are in no step."""
    text = samples.verl_colocated_log().replace(" - timing_s/old_log_prob:", " - timing_s\n/old_log_prob:")
    found = read(tmp_path, text)
    assert found.source.skipped == {"parts of step lines, which are wrapped or cut": 5}
    assert any("look shorter than they were" in note for note in found.source.notes)
    with pytest.raises(
        ConfigError, match=r"no line has the times .* of 2: 1 step lines without times, 1 parts"
    ):
        read(tmp_path, "step:1 - actor/lr:1e-6 - timing_s\n/gen:5.0 - timing_s/step:9.0\n")


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


def test_a_step_without_one_of_its_times_is_left_out_whole_and_said(tmp_path: Path) -> None:
    """Taken for 0 s, the missing time would make the step, and every mean, shorter than it was."""
    wrong = [
        '{"step": 7, "gen_s": NaN, "update_actor_s": 60.0, "step_s": 105.0}',
        '{"step": 8, "gen_s": -4, "update_actor_s": 60.0, "step_s": 56.0}',
        '{"step": 9, "gen_s": "fast", "update_actor_s": 60.0}',
        '{"step": 9, "gen_s": 1e308, "update_actor_s": 1e308}',
        f'{{"step": 9, "gen_s": {"9" * 400}}}',
    ]
    found = read(tmp_path, samples.step_file() + "\n".join(wrong) + "\n", name="a.jsonl")
    assert found.source.skipped == {NO_TIME: 5}
    assert means(found.pools[0])["gen"] == 43.0


def test_what_was_not_measured_and_what_is_no_time_is_left_out_alone(tmp_path: Path) -> None:
    line = '{"step": 6, "gen_s": 43.0, "update_actor_s": 60.0, "reward_s": null, "tokens_per_s": 9e4}\n'
    found = read(tmp_path, samples.step_file() + line, name="a.jsonl")
    assert found.source.used == 6
    assert {"tokens_per", "reward"}.isdisjoint(means(found.pools[0]))


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


@pytest.mark.parametrize("quote", ["", "'"])
def test_what_a_trainer_printed(tmp_path: Path, quote: str) -> None:
    """The log of its process: progress bars, warnings, and a dictionary for each step."""
    lines = ["Loading weights …", "{'not': 'numbers'}"]
    for step in range(1, 5):
        numbers = {"loss": "0.1", "grad_norm": "nan", "step_time": f"{30.0 + step}", "epoch": "1e-2"}
        shown = ", ".join(f"'{key}': {quote}{value}{quote}" for key, value in numbers.items())
        lines.append(f" {step}%|▏         | {step}/100 [00:30<50:01, 30.3s/it]\r{{{shown}}}")
    lines.append("{'train_runtime': 140.0, 'train_loss': 0.1, 'epoch': 1.0}")
    found = read(tmp_path, "\n".join(lines) + "\n", name="out.log")
    assert found.source.kind == "trl"
    assert found.pools[0].period.mean == pytest.approx(32.5)
    assert found.source.skipped == {
        "not a log entry": 5,  # the bars, and a line of words
        "the summary at the end": 1,
        "entries without times": 1,
    }


def test_an_entry_of_a_trainer_with_a_time_that_is_none(tmp_path: Path) -> None:
    history = json.loads(samples.trainer_state())
    history["log_history"] += [{"step": 5, "step_time": float("nan")}, {"step": 6, "step_time": 10**400}]
    found = read(tmp_path, json.dumps(history), name="s.json")
    assert found.source.skipped[NO_TIME] == 2
    assert found.pools[0].period.mean == pytest.approx(32.5)


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


def test_what_nvidia_smi_dmon_prints(tmp_path: Path) -> None:
    found = read(tmp_path, samples.dmon_table(), name="dmon.txt")
    assert [pool.label for pool in found.pools] == ["gpu0", "gpu1"]
    assert [pool.busy.mean for pool in found.pools] == pytest.approx([20.0, 30.0])
    assert found.pools[0].period.mean == pytest.approx(50.0)  # also over midnight
    assert found.source.skipped["lines without a number"] == 41  # the headings


def test_what_an_exporter_wrote(tmp_path: Path) -> None:
    (pool,) = read(tmp_path, samples.exporter_csv(), name="dcgm.csv").pools
    assert (pool.busy.mean, pool.period.mean) == (pytest.approx(20.0), pytest.approx(50.0))
    assert pool.device_bytes == 40000 << 20


def test_a_gpu_that_is_always_busy_is_no_pool_but_is_told(tmp_path: Path) -> None:
    lines = ["timestamp_ms,gpu_index,gpu_util_pct"]
    for number in range(600):
        lines += [f"{number * 500},0,{80 if number % 100 > 40 else 0}", f"{number * 500},1,99"]
    found = read(tmp_path, "\n".join(lines) + "\n", name="g.csv")
    assert [pool.label for pool in found.pools] == ["gpu0"]
    assert any("gpu1" in note and "100.0%" in note for note in found.source.notes)


def test_samples_that_are_no_numbers_and_holes_are_told(tmp_path: Path) -> None:
    lines = samples.utilization_csv().splitlines()
    at = lines[600].split(", ")[0]
    wrong = [f"{at}, 0, nan %, 1 MiB", f"{at}, 0, inf %, 1 MiB", f"{at}, 0", ""]
    found = read(tmp_path, "\n".join(lines[:600] + wrong + lines[800:]) + "\n", name="g.csv", warmup=0.0)
    assert found.source.skipped["lines without a number"] == 2
    assert found.source.skipped["incomplete lines"] == 1
    assert any("1 holes" in note for note in found.source.notes)
    assert found.pool("gpu0").period.mean == pytest.approx(50.0, abs=0.6)
    # GPU 1 begins busy: its first cycle is whole from 30 s on, and the last block may go on after the record.
    assert found.source.skipped["outside whole cycles"] > 200


def test_a_device_that_hides_its_memory(tmp_path: Path) -> None:
    record = samples.utilization_csv().replace("40000 MiB", "[N/A]").replace("30000 MiB", "[N/A]")
    pool = read(tmp_path, record, name="gpus.csv").pool("gpu0")
    assert (pool.device_bytes, pool.duty) == (0, pytest.approx(0.4, abs=0.03))


def test_a_role_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    found = read(tmp_path, samples.utilization_csv(), name="gpus.csv", roles={"9": "trainer"})
    assert any("--role names GPU 9; the record has 0, 1" in note for note in found.source.notes)


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
    found = read_all([tmp_path / "a" / "train.log", tmp_path / "b" / "train.log"], note=print)
    assert [profile.name for profile in found] == ["train", "train-2"]


def in_a_folder(folder: Path, **texts: str) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    (folder / "checkpoints").mkdir()
    return folder


def test_a_folder_of_logs_is_read_and_what_else_is_in_it_is_told(tmp_path: Path) -> None:
    log = samples.verl_colocated_log()
    folder = in_a_folder(
        tmp_path / "runs", one_log=log, two_log=log, index_json="[]", weights_bin=log, e_log=""
    )
    said: list[str] = []
    found = read_all([folder], note=said.append)
    assert [profile.name for profile in found] == ["one", "two"]
    assert said == [f"{folder}: no record of a job in checkpoints, e.log, index.json, weights.bin"]


def test_the_index_of_step_files_is_not_told_as_left_out(tmp_path: Path) -> None:
    index = '[{"file": "a.jsonl", "gpus": "4 trainer H100"}]'
    folder = in_a_folder(tmp_path / "runs", a_jsonl=samples.step_file(), index_json=index)
    said: list[str] = []
    (profile,) = read_all([folder], note=said.append)
    assert profile.pools[0].accelerators == 4
    assert said == [f"{folder}: no record of a job in checkpoints"]


def test_the_logs_that_profiles_of_a_folder_were_made_of_are_no_jobs_beside_them(
    tmp_path: Path,
) -> None:
    folder = in_a_folder(tmp_path / "runs", one_log=samples.verl_colocated_log(), plan_json='{"groups": []}')
    (profile,) = read_profiles(folder / "one.log")
    (folder / "one.json").write_bytes(encode_profile(profile))
    said: list[str] = []
    assert [profile.name for profile in read_all([folder], note=said.append)] == ["one"]
    assert said == [f"{folder}: only its profiles are taken, not checkpoints, one.log, plan.json"]


def test_a_folder_of_nothing_that_can_be_read_is_refused_and_a_broken_file_in_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no profile or record .* folder \(a.md, checkpoints\)"):
        read_all([in_a_folder(tmp_path / "none", a_md="# words")], note=print)
    broken = in_a_folder(tmp_path / "broken", one_json='{"coslice_profile": 1, "name": 5}')
    with pytest.raises(ConfigError, match=r"one\.json"):
        read_all([broken], note=print)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_what_other_systems_put_before_a_text(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "gpus.csv").write_bytes(samples.utilization_csv().encode(encoding))
    (found,) = read_profiles(tmp_path / "gpus.csv")
    assert found.pool("gpu0").duty == pytest.approx(0.4, abs=0.03)


def test_a_compressed_file_is_told_how_to_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_bytes(gzip.compress(samples.verl_colocated_log().encode()))
    with pytest.raises(ConfigError, match="gunzip"):
        read_profiles(tmp_path / "train.log")


def test_a_file_without_work_is_named(tmp_path: Path) -> None:
    (tmp_path / "idle.jsonl").write_text('{"gen_s": 0, "update_actor_s": 0, "step_s": 0}\n')
    with pytest.raises(ConfigError, match=r"idle\.jsonl.*nothing to share"):
        read_profiles(tmp_path / "idle.jsonl")


@pytest.mark.parametrize("stem", ["entraînement 3", "_-x-", "ж", "n" * 90])
def test_a_profile_can_be_read_again_whatever_its_log_was_called(tmp_path: Path, stem: str) -> None:
    (tmp_path / f"{stem}.log").write_text(samples.verl_colocated_log())
    (found,) = read_profiles(tmp_path / f"{stem}.log")
    assert decode_profile(encode_profile(found)).name == found.name


FORMATS = {
    "verl": samples.verl_async_log(),
    "verl json": samples.verl_json_log(),
    "steps": samples.step_file(),
    "trl": samples.trainer_state(),
    "utilization": samples.utilization_csv(interval=5.0, cycles=4),
    "dcgm": samples.dcgm_table(cycles=2),
}
ODD = (
    "NaN",
    "nan",
    "-Infinity",
    "inf",
    "1e308",
    "1e999",
    "-1",
    "0",
    "null",
    "true",
    '"x"',
    "[]",
    "9" * 400,
    "",
)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_is_read_as_far_as_it_goes_or_refused(tmp_path: Path, kind: str) -> None:
    """Numbers, bytes and ends are changed at random; nothing but a ``ConfigError`` comes of it, every line is
    accounted for, and what is written can be read."""
    dice = random.Random(kind)
    file = tmp_path / "damaged"
    for _ in range(60):
        text = FORMATS[kind]
        for _ in range(dice.choice((1, 2, 5))):
            spots = list(re.finditer(r"-?\d+\.?\d*", text))
            if dice.random() < 0.7 and spots:
                spot = dice.choice(spots)
                text = text[: spot.start()] + dice.choice(ODD) + text[spot.end() :]
            else:
                begin, end = sorted((dice.randrange(len(text) + 1), dice.randrange(len(text) + 1)))
                text = text[:begin] + dice.choice("\x00\xff{},:\n") + text[min(end, begin + 40) :]
        file.write_text(text)
        try:
            found = read_profiles(file, ReadOptions(interval_s=1.0))
        except ConfigError:
            continue
        for profile in found:
            assert profile.source.used + sum(profile.source.skipped.values()) == profile.source.read
            assert decode_profile(encode_profile(profile)).name == profile.name
