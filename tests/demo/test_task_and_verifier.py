"""The verifier checks answers for real, and no faster than its rate."""

import json
import subprocess
import sys
import time
from http.client import HTTPConnection

import pytest

from coslice.demo.task import TASKS, score
from coslice.demo.verifier import RateLimit


def test_the_right_answer_scores_one_and_only_the_right_answer() -> None:
    for task, right in TASKS.items():
        for question in ("0123", "9981", "5555", "7302"):
            answer = right(question)
            assert score(task, question, answer) == 1.0
            for place in range(4):
                wrong = answer[:place] + str((int(answer[place]) + 1) % 10) + answer[place + 1 :]
                assert score(task, question, wrong) == 0.75


def test_a_rate_limit_admits_its_rate_and_saves_nothing_up_while_idle() -> None:
    limit = RateLimit(100)
    assert limit.reserve(50, now=10.0) == pytest.approx(10.5)
    assert limit.reserve(50, now=10.1) == pytest.approx(11.0), "the second waits for the first"
    assert limit.reserve(10, now=99.0) == pytest.approx(99.1), "an idle hour buys nothing"


def _ask(port: int, body: object) -> tuple[int, dict[str, object]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/score", json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_the_service_scores_refuses_nonsense_and_ends_with_its_starter() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "coslice.demo.verifier", "--rate", "20"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = json.loads(process.stdout.readline())["port"]
        begin = time.monotonic()
        status, answer = _ask(port, {"task": "sort", "items": [["3120", "0123"], ["3120", "0000"]] * 3})
        assert (status, answer) == (200, {"rewards": [1.0, 0.25] * 3})
        assert time.monotonic() - begin >= 6 / 20, "six answers at 20 per second"
        status, answer = _ask(port, {"task": "juggle", "items": [["1", "1"]]})
        assert status == 400
        assert "reverse" in str(answer["error"]), "names the tasks there are"
    finally:
        process.stdin.close()
        assert process.wait(30) == 0
        process.stdout.close()
