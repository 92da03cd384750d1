"""Real Ray: identity by runtime_env, sections in tasks and actors of every kind, an actor started anew."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import coslice
from coslice.integrations.ray import carry, get, runtime_env
from coslice.testing.recording import RecordingOrchestrator

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ray = pytest.importorskip("ray", reason="needs ray: make test-ray")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_two_jobs.py"
COSLICE = (sys.executable, "-m", "coslice.cli.main")
PLAIN = {key: value for key, value in os.environ.items() if not key.startswith("COSLICE_")}
PLAIN |= {"RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture
def recording() -> Iterator[RecordingOrchestrator]:
    with RecordingOrchestrator(groups=("train", "sample")) as recording:
        yield recording


def in_group(recording: RecordingOrchestrator, group: str) -> dict[str, Any]:
    return runtime_env(group=group, env=recording.env("job"))


def test_tasks_and_actors_plain_threaded_and_async_hold_their_group(
    cluster: None, recording: RecordingOrchestrator
) -> None:
    @ray.remote(num_cpus=0)
    def task() -> str:
        @coslice.connect().on_accelerators
        def evaluate() -> str:
            return os.environ["COSLICE_INCARNATION"]

        return evaluate()

    @ray.remote(num_cpus=0)
    class Actor:
        def __init__(self) -> None:
            self.orchestrator = coslice.connect()

        def train(self) -> str:
            with self.orchestrator.on_accelerators(phase="train"):
                return os.environ["COSLICE_INCARNATION"]

    @ray.remote(num_cpus=0)
    class AsyncActor:
        def __init__(self) -> None:
            self.orchestrator = coslice.connect()

        async def generate(self) -> str:
            async with self.orchestrator.on_accelerators(phase="generate"):
                await asyncio.sleep(0)
                return os.environ["COSLICE_INCARNATION"]

    train, sample = in_group(recording, "train"), in_group(recording, "sample")
    plain = Actor.options(runtime_env=train).remote()
    threaded = Actor.options(runtime_env=train, max_concurrency=4).remote()
    concurrent = AsyncActor.options(runtime_env=sample).remote()
    refs = [task.options(runtime_env=train).remote(), plain.train.remote()]
    refs += [threaded.train.remote() for _ in range(4)]
    refs += [concurrent.generate.remote() for _ in range(4)]
    assert set(ray.get(refs, timeout=200)) == {"job-recorded"}
    asked = {(said.phase, said.groups) for said in recording.trace if said.kind == "acquire"}
    assert asked == {("evaluate", ("train",)), ("train", ("train",)), ("generate", ("sample",))}
    assert recording.problems() == []


def test_a_get_gives_the_accelerators_away_until_the_result_is_there(
    cluster: None, recording: RecordingOrchestrator
) -> None:
    @ray.remote(num_cpus=0)
    class Gate:
        def __init__(self) -> None:
            self.opened = asyncio.Event()

        async def open(self) -> None:
            self.opened.set()

        async def passed(self) -> str:
            await self.opened.wait()
            return "through"

    gate = Gate.remote()
    client = coslice.Client.from_env(recording.env("job", "train"))
    with client, client.on_accelerators(phase="train"):
        waiting = gate.passed.remote()
        late = gate.open.remote()  # runs only once get() has let go, for all that we can see
        assert get(waiting, client=client, phase="train") == "through"
        ray.get(late)
        before = len(recording.turns())
        assert get(ray.put(1), client=client) == 1  # it is there: nothing is given up
        assert len(recording.turns()) == before
        assert recording.held
    assert recording.problems() == []


def test_an_identity_is_one_for_all_members_and_no_secret_travels() -> None:
    env = {"COSLICE_ORCHESTRATOR": "h:1", "COSLICE_TOKEN": "secret", "COSLICE_NODE": "n"}
    one = runtime_env("a", ("train", "sample"), env=env, extend={"env_vars": {"X": "1"}, "pip": []})
    two = runtime_env("a", "train", env={**env, "COSLICE_AGENT": "127.0.0.1:9001"}, cpus=(1, 2))
    assert one["env_vars"]["COSLICE_INCARNATION"] == two["env_vars"]["COSLICE_INCARNATION"]
    assert one["env_vars"]["COSLICE_GROUP"] == "train,sample"
    assert one["env_vars"]["X"] == "1"
    assert one["pip"] == []
    assert "COSLICE_TOKEN" not in one["env_vars"]
    assert "COSLICE_NODE" not in one["env_vars"]
    assert two["env_vars"]["COSLICE_ACCELERATOR_CPUS"] == "1,2"
    assert "COSLICE_AGENT" not in runtime_env("a", env={**env, "COSLICE_AGENT": "far:9001"})["env_vars"]
    with pytest.raises(coslice.ConfigError, match="no name"):
        runtime_env(env=env)


def test_a_framework_that_initializes_ray_itself_carries_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda runtime_env=None, **_: given.append(runtime_env))
    monkeypatch.setenv("COSLICE_ORCHESTRATOR", "h:1")
    monkeypatch.setenv("COSLICE_JOB", "a")
    monkeypatch.setenv("COSLICE_INCARNATION", "t")
    carry()
    carry()
    ray.init(runtime_env={"env_vars": {"NCCL_DEBUG": "WARN"}})
    assert len(given) == 1
    assert given[0]["env_vars"] == {
        "NCCL_DEBUG": "WARN",
        "COSLICE_ORCHESTRATOR": "h:1",
        "COSLICE_JOB": "a",
        "COSLICE_INCARNATION": "t",
    }


@pytest.fixture
def up(tmp_path: Path) -> Iterator[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    groups = ["--group", f"train:cpus={cores[0]}:memory=96MiB"]
    groups += ["--group", f"sample:cpus={cores[-1]}:memory=96MiB"]
    arguments = [*COSLICE, "up", "--json", *groups, "--state", str(tmp_path / "state")]
    arguments += ["--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0"]
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                arguments, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=PLAIN
            )
        )
        stack.callback(process.terminate)
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()) | {"cores": (cores[0], cores[-1])}


def test_an_actor_that_is_started_anew_is_a_new_member_of_the_same_job(
    cluster: None, up: dict[str, Any]
) -> None:
    @ray.remote(num_cpus=0, max_restarts=1, max_task_retries=1)
    class Actor:
        def __init__(self) -> None:
            self.orchestrator = coslice.connect()

        def train(self, dies: bool) -> tuple[int, int]:
            with self.orchestrator.on_accelerators(phase="train") as grant:
                if dies:
                    os._exit(1)
                return os.getpid(), grant.leases[0].epoch

    env = {"COSLICE_ORCHESTRATOR": up["orchestrator"], "COSLICE_AGENT": up["agent"]}
    actor = Actor.options(runtime_env=runtime_env("restarted", "train", env=env)).remote()
    before = ray.get(actor.train.remote(False), timeout=200)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.train.options(max_task_retries=0).remote(True), timeout=200)
    after = ray.get(actor.train.remote(False), timeout=200)
    assert after[0] != before[0]
    assert after[1] > before[1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_two_jobs_of_trainers_and_samplers_finish_unattended(up: dict[str, Any], staleness: int) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--staleness", str(staleness), "--steps", "6", "--reward-s", "0.2",
         "--train-passes", "2",
         "--train-cpus", str(up["cores"][0]), "--sample-cpus", str(up["cores"][1]),
         "--journal", up["journal"]],
        env=PLAIN | {"COSLICE_ORCHESTRATOR": up["orchestrator"], "COSLICE_AGENT": up["agent"]},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])["shared"]
    assert set(report["jobs"]) == {"a", "b"}
    assert all(job["stalest"] <= staleness for job in report["jobs"].values())
    for duty in report["duty"].values():
        assert duty["busy"] > 0
        assert 0 < duty["held"] <= 1
    journal = Path(up["journal"]).read_text()
    assert "lock_order" not in journal.lower(), "somebody asked in the wrong order"
