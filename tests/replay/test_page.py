import json
import os
import re
from pathlib import Path

import pytest
from replay import sample

from coslice.errors import ConfigError
from coslice.replay.page import render, write_whole


def _data(page: Path) -> dict[str, object]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_page_carries_its_data_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    render(sample.write(tmp_path / "journal.jsonl", demo=True), page)
    assert _data(page)["summary"]["useful_duty"] == 0.875  # type: ignore[index]
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_what_is_no_plain_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    journal, pipe, link = sample.write(tmp_path / "j.jsonl", demo=True), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "page.html")
    render(journal, link)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "some")
        assert os.read(reader, 100) == b"some"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert _data(tmp_path / "page.html")


def test_text_from_a_journal_cannot_end_the_script(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    lines = sample.lines()
    lines[1]["reasons"] = [["queued", "</script><script>alert(1)</script><!--"]]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    render(journal, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("</script>") == 2  # the data's and the program's own
    assert "</script><script>alert(1)</script><!--" in json.dumps(_data(tmp_path / "page.html"))


def test_a_journal_cut_in_the_middle_is_drawn_and_says_so(tmp_path: Path) -> None:
    render(sample.write(tmp_path / "journal.jsonl", torn=True), tmp_path / "page.html")
    assert _data(tmp_path / "page.html")["torn"] is True


def test_a_journal_damaged_in_the_middle_is_drawn_and_says_so(tmp_path: Path) -> None:
    journal = sample.write(tmp_path / "journal.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    lines[3:3] = ["\x00garbage\n", '{"t": "soon", "event": 7, "group": "g"}\n']
    journal.write_text("".join(lines))
    render(journal, tmp_path / "page.html")
    assert _data(tmp_path / "page.html")["damaged"] == 2


def test_a_rotated_journal_is_drawn_whole(tmp_path: Path) -> None:
    whole = sample.write(tmp_path / "whole.jsonl")
    header, *lines = whole.read_text().splitlines(keepends=True)
    half = len(lines) // 2
    (tmp_path / "journal.jsonl.1").write_text(header + "".join(lines[:half]))
    (tmp_path / "journal.jsonl").write_text(header + "".join(lines[half:]))
    render(whole, tmp_path / "one.html")
    render(tmp_path / "journal.jsonl", tmp_path / "two.html")
    assert _data(tmp_path / "one.html")["groups"] == _data(tmp_path / "two.html")["groups"]


def test_no_folder_is_made_for_the_page(tmp_path: Path) -> None:
    journal = sample.write(tmp_path / "journal.jsonl")
    with pytest.raises(ConfigError, match="no folder"):
        render(journal, tmp_path / "typo" / "page.html")
    assert not (tmp_path / "typo").exists()


def test_a_file_that_is_no_journal_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("hello\n")
    with pytest.raises(ConfigError, match="journal"):
        render(foreign, tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
