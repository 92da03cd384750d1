"""Two jobs that are inference servers share one accelerator, from the command line to their last token."""

import json
import subprocess
import sys
from typing import Any

import pytest
from cli.conftest import COSLICE, ENVIRONMENT, Start, coslice, run_arguments

JOB = """
import json, sys
import coslice
from coslice.testing.engines import FakeEngine

orchestrator = coslice.connect()
with FakeEngine(sys.argv[1], weights=16 << 20, kv=8 << 20) as engine:
    words = engine.generate()
    handle = coslice.workload.register(endpoint=engine.url)
    assert handle.error is None, handle.error
    print("ready", flush=True)
    sys.stdin.readline()
    for turn in range(3):
        with orchestrator.on_accelerators():
            assert engine.generate() == words
    state = engine.state()
    slept = sum("/sleep" in call or "/release" in call for call in state["calls"])
    print(json.dumps({"slept": slept, "dead": state["dead"]}))
"""


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    return dict(json.loads(out))


@pytest.mark.e2e
def test_two_servers_take_turns_and_answer_as_before(up: Start) -> None:
    served = up("--memory", "64MiB")
    jobs = [
        subprocess.Popen(
            [*COSLICE, *run_arguments(served, name, sys.executable, "-c", JOB, kind)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
        )
        for name, kind in (("a", "vllm"), ("b", "sglang"))
    ]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()
    facts = [finish(job) for job in jobs]
    assert [fact["dead"] for fact in facts] == [False, False]
    # Both were on the device: whoever came first had the other in the way.
    assert sum(fact["slept"] for fact in facts) >= 1


def test_run_with_an_endpoint_stands_for_the_server_that_the_command_starts(up: Start) -> None:
    served = up()
    script = "import os, subprocess, sys; print(os.environ['COSLICE_BACKEND'], flush=True)\n"
    script += "os.environ['COSLICE_PROFILE'] = 'of its own'; sys.exit(subprocess.call(sys.argv[1:]))"
    seen = "import os; print(*map(os.environ.get, ('COSLICE_JOB', 'COSLICE_BACKEND', 'COSLICE_PROFILE')))"
    within = (*COSLICE, *run_arguments(served, "b", sys.executable, "-c", seen))
    command = run_arguments(served, "a", sys.executable, "-c", script, *within)
    at = command.index("--")
    urls = ["--endpoint", "http://127.0.0.1:8000", "--endpoint", "http://127.0.0.1:8001"]
    result = coslice(*command[:at], *urls, *command[at:])
    assert result.returncode == 0, result.stderr
    urls_told = "app_endpoint:url=http://127.0.0.1:8000 http://127.0.0.1:8001"
    assert result.stdout.splitlines() == [urls_told, "b None of its own"]
    refused = coslice(*command[:at], "--endpoint", "http://10.0.0.7:8000", *command[at:])
    assert refused.returncode == 2
    assert "its own loopback only" in refused.stderr
