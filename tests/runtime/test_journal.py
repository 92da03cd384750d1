"""The journal: what is written is read back; what a crash, a rotation or a stranger left is understood."""

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coslice.core.effects import PushFacts, Reason, ReasonCode
from coslice.core.events import AcquireRequested, DeadlinePassed
from coslice.core.ids import Incarnation, JobId, RequestId, SessionId
from coslice.core.outcome import Step
from coslice.errors import ConfigError
from coslice.runtime.journal import Journal, read_journal, read_journals

ASKED = AcquireRequested(
    at=12.5,
    job=JobId("job-a"),
    incarnation=Incarnation("i1"),
    session=SessionId("s1"),
    request=RequestId("s1/1"),
)
TAKEN = Step(None, (PushFacts(),), (Reason(ReasonCode.GRANTED_EMPTY, "nobody was there"),))
SUMMARY = {"occupancy": "held", "job": "job-a", "epoch": 1, "waiting": []}


def _begun(path: Path | None, **options: int) -> Journal:
    journal = Journal(path, orchestrator="main", **options)
    journal.open(clock=10.0)
    return journal


def test_lines_have_the_documented_form(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = _begun(path)
    journal.record("g", 12.5, ASKED, TAKEN, SUMMARY)
    journal.note(13.0, job="job-a", session="s1", name="reward", value=0.5, step=3)
    journal.line({"t": 14.0, "solo": {"job": "job-a"}})
    journal.close()
    header, event, note, solo = map(json.loads, path.read_text().splitlines())
    assert header["coslice_journal"] == 1
    assert (header["clock"], header["orchestrator"]) == (10.0, "main")
    assert event["event"]["type"] == "AcquireRequested"
    assert event["event"]["job"] == "job-a"
    assert (event["t"], event["group"], event["state"]) == (12.5, "g", SUMMARY)
    assert event["effects"] == [{"type": "PushFacts"}]
    assert event["reasons"] == [["granted_empty", "nobody was there"]]
    assert note == {
        "t": 13.0,
        "note": {"job": "job-a", "session": "s1", "name": "reward", "value": 0.5, "step": 3, "text": ""},
    }
    assert solo == {"t": 14.0, "solo": {"job": "job-a"}}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read = read_journal(path)
    assert (read.header, read.records, read.torn) == (header, [event, note, solo], False)


async def test_on_a_loop_lines_are_flushed_together_without_being_asked(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = _begun(path)
    for n in range(3):
        journal.line({"t": n})
    assert read_journal(path).records == []
    await asyncio.sleep(0)
    assert [record["t"] for record in read_journal(path).records] == [0, 1, 2]
    journal.line({"t": 3})
    journal.close()
    assert [record["t"] for record in read_journal(path).records] == [0, 1, 2, 3]


def test_without_a_path_nothing_is_kept() -> None:
    journal = _begun(None)
    journal.record("g", 1.0, DeadlinePassed(at=1.0), TAKEN, SUMMARY)
    journal.close()


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(min_value=0, max_value=400))
def test_cut_anywhere_it_gives_the_whole_lines_and_can_be_continued(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    journal = _begun(path)
    for n in range(4):
        journal.line({"t": n, "text": "grüße\n"})
    journal.close()
    data = path.read_bytes()
    kept = data[: max(len(data) - cut, data.index(b"\n") + 1)]
    path.write_bytes(kept)
    read = read_journal(path)
    whole = kept.count(b"\n") - 1
    assert [record["t"] for record in read.records] == list(range(whole))
    assert read.torn == (not kept.endswith(b"\n"))
    again = _begun(path)
    again.line({"t": 99})
    again.close()
    after = read_journal(path)
    assert not after.torn
    assert after.records[: len(read.records)] == read.records
    assert [record.get("t", "start") for record in after.records[len(read.records) :]] == ["start", 99]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: not a coslice journal"),
        (b'{"coslice_jour', "line 1: not a coslice journal"),
        (b"hello\nworld\n", "line 1: not a coslice journal"),
        (b'{"t": 1}\n', "line 1: not a coslice journal"),
        (b"[1]\n", "line 1: not a coslice journal"),
        (b"\xff\xfe\x00\n", "line 1: not a coslice journal"),
        (b'{"coslice_journal": 7}\n', "line 1: journal format 7, and this version of coslice reads 1"),
    ],
)
def test_what_is_not_a_journal_is_refused_naming_the_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "thing.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as told:
        read_journal(path)
    assert str(path) in str(told.value)


@pytest.mark.parametrize("noise", [b"noise", b"\xff\x00", b"[1]", b'{"t": 1, "te', b'{"t": 1}{"t": 2}'])
def test_what_is_damaged_in_the_middle_is_left_out_and_counted(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"coslice_journal": 1}\n{"t": 1}\n' + noise + b'\n{"t": 2}\n')
    read = read_journal(path)
    assert ([record["t"] for record in read.records], read.damaged, read.torn) == ([1, 2], 1, False)


def test_a_file_of_somebody_else_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(ConfigError, match="line 1"):
        _begun(path)
    assert path.read_text() == "dear diary\n"


def test_a_missing_journal_or_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.jsonl: No such file"):
        read_journal(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigError, match="No such file"):
        _begun(tmp_path / "nowhere" / "journal.jsonl")


def test_a_start_cut_off_within_its_first_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    _begun(path).close()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        journal = _begun(path)
        journal.line({"t": 1})
        journal.close()
        assert read_journal(path).records[-1] == {"t": 1}


def test_rotation_bounds_the_size_and_keeps_one_predecessor(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = _begun(path, max_bytes=1000)
    for n in range(200):
        journal.line({"t": n, "text": "x" * 50})
    journal.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["journal.jsonl", "journal.jsonl.1"]
    assert all(file.stat().st_size < 1200 for file in files)
    times = [record["t"] for file in reversed(files) for record in read_journal(file).records]
    assert times == list(range(times[0], 200))


def test_rotated_files_are_read_as_one_the_oldest_first(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = _begun(path, max_bytes=1000, keep=3)
    for n in range(200):
        journal.line({"t": n, "text": "x" * 50})
    journal.close()
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["journal.jsonl", "journal.jsonl.1", "journal.jsonl.2", "journal.jsonl.3"]
    read = read_journals(path)
    times = [record["t"] for record in read.records if "t" in record]
    assert times == list(range(times[0], 200))
    assert len(times) > 20
    assert (read.torn, read.damaged) == (False, 0)


def test_a_link_in_the_place_of_the_next_file_costs_lines_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, victim = tmp_path / "journal.jsonl", tmp_path / "victim"
    victim.write_text("mine")
    journal = _begun(path, max_bytes=300)
    original = os.replace

    def replace(source: Path, target: Path) -> None:
        original(source, target)
        path.symlink_to(victim)  # somebody was quick

    monkeypatch.setattr(os, "replace", replace)
    journal.line({"t": 0, "text": "x" * 300})
    journal.line({"t": 1})
    assert (victim.read_text(), journal.lost) == ("mine", 1)
    assert "is a link" in caplog.text
    journal.close()


def test_a_full_disk_costs_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal("/dev/full")
    journal.path = None
    journal.open(clock=0.0)
    journal._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    for n in range(5):
        journal.line({"t": n})
    assert journal.lost == 5
    assert caplog.text.count("going on without it") == 1
    journal.close()
