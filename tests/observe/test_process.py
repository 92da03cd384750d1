"""``process_*`` are what prometheus_client says of a process, without the listing of its files."""

import os
import resource
from pathlib import Path

import pytest
from prometheus_client import ProcessCollector

from coslice.observe import process
from coslice.observe.process import Process, open_files


def test_it_says_what_the_library_says() -> None:
    library = {family.name: family for family in ProcessCollector(registry=None).collect()}
    ours = {family.name: family for family in Process().collect()}
    assert ours.keys() == library.keys()
    for name, family in ours.items():
        assert (family.type, family.documentation) == (library[name].type, library[name].documentation)
    for name in ("process_start_time_seconds", "process_max_fds"):
        assert ours[name].samples == library[name].samples


def test_each_open_file_counts() -> None:
    before = open_files()
    more = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    assert open_files() == before + 20
    for fd in more:
        os.close(fd)


def test_a_kernel_that_does_not_count_them_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Uncounted(type(tmp_path)):  # type: ignore[misc]
        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            told = list(super().stat(follow_symlinks=follow_symlinks))
            return os.stat_result([*told[:6], 0, *told[7:]])

    folder = tmp_path / "self" / "fd"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / str(number)).touch()
    monkeypatch.setattr(process, "PROC", Uncounted(tmp_path))
    assert open_files() == 3


def test_without_proc_it_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PROC", tmp_path)
    assert list(Process().collect()) == []


def test_a_process_that_may_open_no_more_files_says_how_many_it_has() -> None:
    told = Process()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = {family.name: family.samples[0].value for family in told.collect()}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found.pop("process_max_fds") == 0
    assert found in ({"process_open_fds": before}, {})  # before Linux 6.2 they cannot be counted then
