"""Records of GPU utilisation as tools of several versions write them: which device, clock and unit."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coslice.errors import ConfigError
from coslice.profile.model import Profile
from coslice.profile.options import ReadOptions
from coslice.profile.read import Foreign, read_profiles

CYCLE, BUSY = 60, 20
BEGIN = datetime(2026, 10, 24, 23, 0, tzinfo=UTC)


def load(second: int) -> int:
    """Busy in the last third of each minute."""
    return 90 if second % CYCLE >= CYCLE - BUSY else 0


def read(tmp_path: Path, lines: list[str], **options: object) -> Profile:
    file = tmp_path / "gpus.csv"
    file.write_text("\n".join(lines) + "\n")
    (found,) = read_profiles(file, ReadOptions(**options))  # type: ignore[arg-type]
    source = found.source
    assert source.used + sum(source.skipped.values()) == source.read
    return found


def clock(second: int, *, hours: int = 0) -> str:
    return f"{BEGIN + timedelta(seconds=second, hours=hours):%Y/%m/%d %H:%M:%S}.123"


def nvidia_smi(gpus: int = 4, minutes: int = 12) -> list[str]:
    """The query of NVIDIA's own pages: bus ids, and no index."""
    lines = ["timestamp, name, pci.bus_id, pstate, utilization.gpu [%], memory.used [MiB]"]
    for second in range(0, 60 * minutes, 5):
        lines += [
            f"{clock(second)}, NVIDIA H100, 00000000:{0x1B + gpu:02X}:00.0, P0, {load(second)} %, 40 MiB"
            for gpu in range(gpus)
        ]
    return lines


def check(found: Profile, *, accelerators: int = 1) -> None:
    (pool,) = found.pools
    assert (pool.accelerators, pool.period.mean, pool.busy.mean) == (
        accelerators,
        pytest.approx(CYCLE, abs=0.1),
        pytest.approx(BUSY, abs=0.1),
    )


def test_gpus_that_only_their_bus_tells_apart_are_not_mixed(tmp_path: Path) -> None:
    found = read(tmp_path, nvidia_smi())
    check(found, accelerators=4)
    assert any("1 is 00000000:1C:00.0" in note for note in found.source.notes)


def test_a_record_that_ended_in_the_middle_of_a_round_is_still_one_pool(tmp_path: Path) -> None:
    check(read(tmp_path, nvidia_smi()[:-2]), accelerators=4)


def test_a_gpu_that_lacks_some_samples_is_busy_with_the_others(tmp_path: Path) -> None:
    lines = nvidia_smi(minutes=30)
    for second in range(15, 1800, 120):
        row = 1 + second // 5 * 4 + 1
        lines[row] = lines[row].replace(" 0 %,", " [N/A],")
    found = read(tmp_path, lines)
    assert found.source.skipped["lines without a number"] == 15
    check(found, accelerators=4)


def test_samples_of_several_gpus_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    """Mixed, two of them that are busy by turns would be one that always is."""
    lines = ["timestamp, pstate, utilization.gpu [%]"]
    for second in range(0, 1200, 5):
        one = f"{clock(second)}, P0, {load(second)} %"
        lines += [one, one.replace(".123", ".125")]
    with pytest.raises(ConfigError, match="add index"):
        read(tmp_path, lines)
    check(read(tmp_path, [lines[0], *lines[1::2]]))
    whole = [line.replace(".123", "").replace(".125", "") for line in lines]
    found = read(tmp_path, whole)
    assert any("240 samples have the time of the one before" in note for note in found.source.notes)


def test_a_clock_that_is_put_back_cuts_the_record(tmp_path: Path) -> None:
    """Summer time ends: sorted by time, an hour would have the samples of two, one into the other."""
    lines = ["timestamp, index, utilization.gpu [%]"]
    for second in range(0, 4 * 3600, 5):
        hours = 2 if second < 7200 else 1
        busy = load(second + (30 if second >= 7200 else 0))
        lines += [f"{clock(second, hours=hours)}, {gpu}, {busy} %" for gpu in (0, 1)]
    found = read(tmp_path, lines)
    check(found, accelerators=2)
    assert ["goes back 1 times" in note for note in found.source.notes].count(True) == 1


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_the_readers_own_zone_changes_nothing(
    tmp_path: Path, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour that was skipped there was none where the record was made."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        begin = datetime(2026, 3, 8, 1, 0, tzinfo=UTC)
        lines = ["timestamp, index, utilization.gpu [%]"]
        for second in range(0, 3 * 3600, 5):
            lines.append(f"{begin + timedelta(seconds=second):%Y/%m/%d %H:%M:%S}.5, 0, {load(second)} %")
        found = read(tmp_path, lines)
        check(found)
        assert not any("hole" in note or "back" in note for note in found.source.notes)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_times_without_a_date_go_on_after_midnight(tmp_path: Path) -> None:
    """``nvidia-smi dmon -o T``."""
    lines = ["#Time        gpu    sm   mem", "#HH:MM:SS    Idx     %     %"]
    begin = datetime(2026, 1, 1, 23, 50, tzinfo=UTC)
    for second in range(1200):
        lines.append(f" {begin + timedelta(seconds=second):%H:%M:%S}      0    {load(second)}     0")
    found = read(tmp_path, lines)
    check(found)
    assert not any("hole" in note or "back" in note for note in found.source.notes)


def test_dmon_in_csv(tmp_path: Path) -> None:
    lines = ["#gpu, pwr, gtemp, sm, mem", "#Idx, W, C, %, %"]
    for second in range(1200):
        lines += [f"0, 70, -, {load(second)}, 0", f"1, 70, -, {load(second)}, 0"]
    check(read(tmp_path, lines, interval_s=1.0), accelerators=2)


def test_samples_that_are_none_take_their_time_too(tmp_path: Path) -> None:
    """Without time stamps a line is an interval, whatever is in it."""
    lines = ["# Entity  GPUTL", "      ID"]
    for second in range(1200):
        value = "N/A" if second % CYCLE in (10, 11) else str(load(second))
        lines += [f"    GPU 0  {value}", f"    GPU-I 0  {load(second + 30)}"]
    found = read(tmp_path, lines, interval_s=1.0)
    assert [pool.label for pool in found.pools] == ["gpu0", "gpuGPU-I-0"]
    assert [pool.period.mean for pool in found.pools] == pytest.approx([60.0, 60.0])


@pytest.mark.parametrize("unit", [1, 1000, 10**6, 10**9])
def test_several_hosts_of_an_exporter_in_one_file(tmp_path: Path, unit: int) -> None:
    """GPU 0 of each; in seconds or parts of them since 1970."""
    lines = ["Time,Hostname,gpu,UUID,DCGM_FI_PROF_GR_ENGINE_ACTIVE"]
    for second in range(0, 3600, 5):
        for number, host in enumerate(("a", "b", "c")):
            value = load(second + (30 if host == "c" else 0)) / 100
            lines.append(f"{(1770000000 + second) * unit},{host},0,GPU-{number},{value}")
    found = read(tmp_path, lines)
    assert [(pool.label, pool.accelerators, pool.nodes) for pool in found.pools] == [
        ("a/gpu0+b/gpu0", 2, 2),
        ("c/gpu0", 1, 1),
    ]
    assert [pool.busy.mean for pool in found.pools] == pytest.approx([20.0, 20.0])


def test_the_first_devices_may_have_no_samples(tmp_path: Path) -> None:
    lines = ["timestamp, index, utilization.gpu [%]"]
    for second in range(0, 1200, 5):
        for gpu in range(8):
            lines.append(f"{clock(second)}, {gpu}, {'[N/A]' if gpu < 4 else f'{load(second)} %'}")
    check(read(tmp_path, lines), accelerators=4)


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    lines = nvidia_smi(gpus=1)
    with pytest.raises(Foreign, match="without its header"):
        read(tmp_path, lines[1:])
    with pytest.raises(ConfigError, match="no time stamp can be read, as in 'Sun Mar 1"):
        read(tmp_path, ["timestamp,gpu,gpu_util", *["Sun Mar 1 10:00:00 2026,0,5"] * 9])
    shares = ["timestamp,gpu,gpu_util", *[f"{at},0,{load(at) / 100}" for at in range(600)]]
    with pytest.raises(ConfigError, match=r"--busy-above 0\.05"):
        read(tmp_path, shares)
    check(read(tmp_path, shares, busy_above=0.05))


def test_lines_that_were_written_the_other_way_round_do_not_cut_the_record(tmp_path: Path) -> None:
    lines = [f"{clock(second)}, 0, {load(second)} %" for second in range(0, 60 * 60, 2)]
    head, usual = ["timestamp, index, utilization.gpu [%]"], len(lines) // 100
    ordered = read(tmp_path, [*head, *lines])
    for first in range(50, len(lines) - 1, len(lines) // usual):
        lines[first : first + 2] = lines[first + 1], lines[first]
    assert read(tmp_path, [*head, *lines]) == ordered


@pytest.mark.parametrize(
    "form", ["{t:%Y}/{t.month}/{t.day} {t.hour}:{t:%M:%S}", "{t:%Y/%m/%d}, {t:%H:%M:%S}"]
)
def test_times_as_spreadsheets_write_them(tmp_path: Path, form: str) -> None:
    lines = ["timestamp, time, index, utilization.gpu [%]" if "," in form else "timestamp, index, util"]
    for second in range(0, 60 * 12, 2):
        lines.append(f"{form.format(t=BEGIN.replace(day=4) + timedelta(seconds=second))}, 0, {load(second)}")
    (pool,) = read(tmp_path, lines).pools
    assert pool.busy.mean == BUSY
    assert pool.period.mean == CYCLE
