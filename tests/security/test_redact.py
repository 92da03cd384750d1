"""Secrets and the user part of addresses reach no log."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from coslice.runtime.journal import Journal
from coslice.security.redact import Redacted, logger, redact

SECRETS = ("hunter2", "p%40ss", "alice", "coslice1.eyJyb2xlIjoiam9i.c2lnbmF0dXJl", "MHcCAQEEIB", "sk-12345")
LINES = (
    "calling http://alice:hunter2@engine:8000/sleep?level=1",
    "postgres://alice:p%40ss@db/x and https://alice@host/",
    "Authorization: Bearer coslice1.eyJyb2xlIjoiam9i.c2lnbmF0dXJl",
    "COSLICE_TOKEN=coslice1.eyJyb2xlIjoiam9i.c2lnbmF0dXJl python train.py",
    "{'token': 'hunter2', 'bytes': 4}",
    "VLLM_API_KEY=sk-12345; password: hunter2",
    "http://engine/?api_key=sk-12345&x=1",
    "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIB\n-----END EC PRIVATE KEY-----",
)


@pytest.mark.parametrize("line", LINES)
def test_secrets_go_and_the_rest_stays(line: str) -> None:
    safe = redact(line)
    assert not any(secret in safe for secret in SECRETS), safe
    assert "***" in safe


@pytest.mark.parametrize(
    "line",
    [
        "job-a waits for train: 2 places before it",
        "http://engine:8000/sleep answered 200",
        "no token is needed on loopback",
        "mail to ops@example.org about http://x/",
    ],
)
def test_what_is_no_secret_is_left_alone(line: str) -> None:
    assert redact(line) == line


def test_arguments_and_tracebacks_are_redacted_too(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Redacted("%(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.warning("calling %s", "http://alice:hunter2@engine/")
    try:
        raise ValueError("no answer from http://alice:hunter2@engine/")
    except ValueError:
        log.exception("broken")
    said = capsys.readouterr().out
    assert "hunter2" not in said
    assert said.count("***@engine") == 3  # the line of source in the traceback has one too


def test_inside_a_job_the_record_is_redacted_whoever_handles_it(caplog: pytest.LogCaptureFixture) -> None:
    logger("coslice").warning("calling %s", "http://alice:hunter2@engine/")
    assert "hunter2" not in caplog.text
    assert "***@engine" in caplog.text


def test_notes_are_redacted(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.open(0.0)
    journal.note(1.0, job="a", name="phase", text="weights from s3://alice:hunter2@bucket/")
    journal.close()
    assert "hunter2" not in (tmp_path / "journal.jsonl").read_text()


def test_the_command_line_prints_no_secret() -> None:
    command = (sys.executable, "-m", "coslice.cli.main", "status", "-o", "http://alice:hunter2@host:1x")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "hunter2" not in done.stdout + done.stderr
    assert "host:port" in done.stderr
