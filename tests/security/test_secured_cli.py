"""The commands of docs/security.md, as a user types them: one machine, TLS and tokens, real processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COSLICE = (sys.executable, "-m", "coslice.cli.main")
PATIENCE = 90
JOB = """
import coslice
orchestrator = coslice.connect()
handle = coslice.workload.register(on_snapshot=lambda: b"state", on_restore=lambda state: None)
with orchestrator.on_accelerators():
    print("inside", handle.error, flush=True)
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("COSLICE_")}


def coslice(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COSLICE, *arguments],
        cwd=folder,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("openssl") is None, reason="`coslice certs` needs openssl")
def test_a_job_runs_over_tls_with_its_token_and_not_with_anothers(tmp_path: Path) -> None:
    made = (
        coslice("certs", "create", "certs", "--name", "localhost", folder=tmp_path),
        coslice("token", "secret", "token.secret", folder=tmp_path),
        coslice("token", "create", "a", "--secret", "token.secret", "--out", "a.token", folder=tmp_path),
    )
    assert [done.returncode for done in made] == [0, 0, 0], made
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "certs").glob("*.key")}
    assert modes == {"ca.key": 0o600, "server.key": 0o600}
    (tmp_path / "job.py").write_text(JOB)
    up = subprocess.Popen(
        [
            *COSLICE,
            *("up", "--json", "--ephemeral", "--device", "host", "--memory", "64MiB"),
            *("--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0", "--token-secret", "token.secret"),
            *("--tls-cert", "certs/server.pem", "--tls-key", "certs/server.key", "--tls-ca", "certs/ca.pem"),
        ],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert up.stdout is not None
        ready = json.loads(up.stdout.readline())
        at = ("-o", ready["orchestrator"], "--agent", ready["agent"])
        trust = {"COSLICE_TLS_CA": str(tmp_path / "certs" / "ca.pem")}
        token = trust | {"COSLICE_TOKEN_FILE": str(tmp_path / "a.token")}
        run = ("run", *at, "--job", "a", "--", sys.executable, "job.py")
        good = coslice(*run, folder=tmp_path, **token)
        assert (good.returncode, good.stdout) == (0, "inside None\n"), good.stderr
        other = coslice("run", *at, "--job", "b", "--", sys.executable, "job.py", folder=tmp_path, **token)
        assert other.returncode != 0
        assert "the token is for job a" in other.stderr
        without = coslice(*run, folder=tmp_path, **trust)
        assert without.returncode == 1
        assert "coslice token create" in without.stderr
        plain = coslice(*run, folder=tmp_path)
        assert plain.returncode == 1
    finally:
        up.terminate()
        up.communicate(timeout=PATIENCE)


def test_swapped_addresses_and_nonsense_are_named(tmp_path: Path) -> None:
    up = subprocess.Popen(
        [
            *COSLICE,
            *("up", "--json", "--ephemeral", "--device", "host", "--memory", "64MiB"),
            *("--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0"),
        ],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert up.stdout is not None
        ready = json.loads(up.stdout.readline())
        o, agent = ready["orchestrator"], ready["agent"]
        for arguments, status, word in (
            (("run", "-o", agent, "--agent", o, "--job", "a", "--", "true"), 2, "swapped"),
            (("run", "-o", o, "--agent", o, "--job", "a", "--", "true"), 2, "swapped"),
            (("status", "-o", agent), 2, "swapped"),
            (("status", "-o", "nonsense"), 2, "host:port"),
            (("explain", "default", "--job", "nobody", "-o", o), 1, "no job nobody"),
            (("explain", "default", "--last", "-3", "-o", o), 2, "--last"),
        ):
            done = coslice(*arguments, folder=tmp_path)
            assert done.returncode == status, done.stderr
            assert word in done.stderr
            assert "Traceback" not in done.stderr
    finally:
        up.terminate()
        up.communicate(timeout=PATIENCE)
