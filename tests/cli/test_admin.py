"""An administrator's commands against a running ``coslice up``."""

import json

from cli.conftest import Start
from cli.conftest import coslice as run

import coslice


def test_evict_and_forget_say_what_they_did(up: Start) -> None:
    there = up("--memory", "64MiB")
    client = coslice.Client(there.orchestrator, job="job-a", groups="default", incarnation="one")
    client.acquire(timeout=30)
    busy = run("forget", "job-a", "-o", there.orchestrator)
    assert busy.returncode == 2
    assert "job-a runs, with 1 connected process(es): stop it first" in busy.stderr
    evicted = run("evict", "job-a", "--reason", "it hangs", "-o", there.orchestrator)
    assert (evicted.returncode, evicted.stdout) == (0, "job-a lost its lease on default.\n")
    again = run("evict", "job-a", "--json", "-o", there.orchestrator)
    assert again.returncode == 2
    assert "there is nothing to take away" in again.stderr
    client.close()
    deleted = run("delete-group", "default", "--json", "-o", there.orchestrator)
    assert json.loads(deleted.stdout) == {"holder": "", "waiters": []}
    gone = run("evict", "job-a", "-g", "default", "-o", there.orchestrator)
    assert gone.returncode == 2
    assert "there is no group 'default' here" in gone.stderr
    unknown = run("forget", "job-z", "-o", there.orchestrator)
    assert "nothing is remembered of a job job-z" in unknown.stderr


def test_help_teaches() -> None:
    for command, says in (("forget", "over"), ("evict", "may ask again"), ("delete-group", "is gone")):
        shown = run(command, "--help", COLUMNS="200")
        assert shown.returncode == 0
        assert says in shown.stdout
        assert "--json" in shown.stdout
