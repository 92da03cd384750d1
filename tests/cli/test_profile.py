"""``coslice profile`` as people call it."""

import json
from pathlib import Path

import profile_samples as samples
import pytest
from typer.testing import CliRunner

from coslice.cli.main import app
from coslice.errors import ConfigError
from coslice.profile.model import decode_profile

runner = CliRunner()


def call(*arguments: str) -> str:
    result = runner.invoke(app, ["profile", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_one_screen_says_how_idle_in_what_blocks_and_whether_it_is_worth_it(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(samples.verl_async_log())
    shown = call(str(log))
    assert len(shown.splitlines()) <= 24
    for words in ("idle", "in blocks of", "recovers", "worth it?", "trainer", "sampler", "left out"):
        assert words in shown


def test_a_swap_that_is_too_slow_is_not_worth_it(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(samples.verl_async_log())
    assert "up to swaps of" in call(str(log), "--swap-s", "1")
    assert "not with swaps of 60 s" in call(str(log), "--swap-s", "60")


def test_a_log_that_says_nothing_of_what_is_idle_gets_no_verdict(tmp_path: Path) -> None:
    """TRL's own: the length of a step. That nothing is idle is not what it says."""
    log = tmp_path / "trainer_state.json"
    log.write_text(samples.trainer_state(profiled=False))
    shown = call(str(log))
    assert "worth it?  not known" in shown
    assert "less than a tenth" not in shown
    assert "not known" in call(str(log), str(log))


def test_figures_and_profile_as_files(tmp_path: Path) -> None:
    log, figures, out = tmp_path / "train.log", tmp_path / "f.json", tmp_path / "p.json"
    log.write_text(samples.verl_async_log())
    call(str(log), "--json", str(figures), "--out", str(out), "--name", "math")
    (told,) = json.loads(figures.read_text())["profiles"]
    means = {phase["name"]: phase["mean_s"] for phase in told["pools"][0]["phases"]}
    assert means["gen"] == 32.5
    profile = decode_profile(out.read_bytes())
    assert profile.name == "math"
    assert "math" in call(str(out))  # a profile is itself something it reads


def test_several_files_make_a_table_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(samples.verl_async_log())
    (tmp_path / "b.log").write_text(samples.verl_colocated_log())
    shown = call(str(tmp_path / "a.log"), str(tmp_path / "b.log"), "--out", f"{tmp_path}/profiles/")
    assert sorted(file.name for file in (tmp_path / "profiles").iterdir()) == ["a.json", "b.json"]
    assert "worth it" in shown


def test_a_folder_is_one_for_a_single_profile_too(tmp_path: Path) -> None:
    """As in the first line of docs/planning.md; the next log must not take the place of this one."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.log").write_text(samples.verl_async_log())
        call(str(tmp_path / f"{name}.log"), "--out", f"{tmp_path}/profiles/")
    assert sorted(file.name for file in (tmp_path / "profiles").iterdir()) == ["a.json", "b.json"]


def test_a_profile_without_a_file(tmp_path: Path) -> None:
    out = tmp_path / "code.json"
    call("--busy", "281", "--period", "619", "--staleness", "8", "--name", "code", "--out", str(out))
    pool = decode_profile(out.read_bytes()).pool("trainer")
    assert pool.duty == pytest.approx(281 / 619)
    assert pool.coupling == "buffered"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a file"),
        (["--busy", "5"], "go together"),
        (["--busy", "9", "--period", "5"], "at most the period"),
        (["x", "--colocated", "--disaggregated"], "one or the other"),
        (["x", "--role", "0=teacher"], "0=trainer"),
        (["/does/not/exist"], "cannot read"),
        (["--busy", "5", "--period", "9", "--name", "../up"], "not a job name"),
        (["--busy", "5", "--period", "1e308"], "--period"),
        (["x", "--state", "5GiB"], "--state goes with --busy and --period"),
        (["x", "--swap-s", "inf"], "--swap-s inf: a number from 0"),
        (["x", "--staleness", "inf"], "--staleness"),
        (["x", "--join-s", "nan"], "--join-s"),
        (["x", "--busy-above", "101"], "--busy-above 101: a number from 0 to 100"),
    ],
)
def test_mistakes_are_told(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call(*arguments)


def test_the_files_are_there_although_nobody_reads_the_screen_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("coslice.cli.profile._print", left)
    with pytest.raises(BrokenPipeError):
        call("--busy", "5", "--period", "9", "--out", str(tmp_path / "p.json"), "--json", str(tmp_path / "f"))
    assert decode_profile((tmp_path / "p.json").read_bytes()).name == "given"
    assert json.loads((tmp_path / "f").read_text())["profiles"]
