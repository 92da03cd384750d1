"""What a live orchestrator and agent say of real hand-overs; and the docs name all of it, nothing else."""

from pathlib import Path

from agent.conftest import MIB
from observe.catalog import ALL, BY_NAME, row, series
from observe.conftest import GROUP, Machine
from prometheus_client import Metric as MetricFamily

DOCS = Path(__file__).parents[2] / "docs" / "operating.md"


async def take_turns(machine: Machine, rounds: int) -> None:
    """Two jobs of 8 MiB each on a device of 12 MiB: every turn but the first is a swap."""
    jobs = [await machine.client(name) for name in ("job-a", "job-b")]
    for name in ("job-a", "job-b"):
        await machine.workload(name, size=8 * MIB)
    for _ in range(rounds):
        for client in jobs:
            await client.yielded(await client.acquire(GROUP))


async def test_the_figures_of_real_hand_overs_agree_with_each_other(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    await take_turns(machine, rounds=3)
    seen = await machine.scrape()
    assert seen.total("coslice_grants_total", group=GROUP) == 6
    for name in ("coslice_acquire_wait_seconds", "coslice_hold_seconds"):
        assert seen.value(f"{name}_count", group=GROUP) == 6
    swaps = seen.value("coslice_group_swaps_total", group=GROUP)
    assert swaps >= 5
    assert seen.value("coslice_grants_total", group=GROUP, reason="granted_swapped") == swaps
    assert seen.value("coslice_group_held_seconds_total", group=GROUP) >= seen.value(
        "coslice_hold_seconds_sum", group=GROUP
    )
    moves = {"group": GROUP, "backend": "app_channel"}
    for stage in ("snapshot", "restore"):
        count = seen.value("coslice_agent_stage_seconds_count", stage=stage, **moves)
        assert count >= 5
        assert seen.value("coslice_agent_moved_bytes_total", stage=stage, **moves) == count * 8 * MIB
    assert seen.value("coslice_group_moved_bytes_total", group=GROUP) <= seen.total(
        "coslice_agent_moved_bytes_total", **moves
    )
    assert seen.value("coslice_agent_operation_seconds_count", group=GROUP) == seen.value(
        "coslice_agent_operations_total", group=GROUP, outcome="done"
    )
    assert seen.value("coslice_agent_contexts", group=GROUP, state="saved") == 1
    assert seen.value("coslice_agent_job_bytes", group=GROUP, job_id="job-b", state="live") == 8 * MIB
    assert seen.value("coslice_agent_host_bytes", kind="held") >= 8 * MIB
    assert seen.value("coslice_agent_device_bytes", group=GROUP, kind="budget") == 12 * MIB
    assert seen.value("coslice_job_turns_total", group=GROUP, job_id="job-a") == 3
    assert seen.value("coslice_job_slowdown_ratio", group=GROUP, job_id="job-a") >= 1
    assert seen.value("coslice_leader") == 1
    assert seen.value("coslice_sessions", state="connected") == 2


async def test_the_queue_is_what_it_is_when_somebody_asks(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    holder, waiter = await machine.client("job-a"), await machine.client("job-b")
    lease = await holder.acquire(GROUP)
    request = await waiter.ask(GROUP)
    await holder.acquire(GROUP)  # taken in after the other's request
    seen = await machine.scrape()
    assert seen.value("coslice_group_state", group=GROUP, state="held") == 1
    assert seen.total("coslice_group_state", group=GROUP) == 1
    assert seen.value("coslice_group_queue_depth", group=GROUP) == 1
    assert seen.value("coslice_group_oldest_wait_seconds", group=GROUP) > 0
    assert seen.value("coslice_group_lease_age_seconds", group=GROUP) > 0
    await holder.yielded(lease)
    await waiter.granted(request)
    after = await machine.scrape()
    assert after.value("coslice_group_queue_depth", group=GROUP) == 0


async def test_faults_are_counted_by_reason(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    await machine.workload("job-a", "--refuse-back", size=8 * MIB)
    await machine.workload("job-b", size=8 * MIB)
    first, second = await machine.client("job-a"), await machine.client("job-b")
    await first.yielded(await first.acquire(GROUP))
    await second.yielded(await second.acquire(GROUP))
    await first.refused(await first.ask(GROUP))
    seen = await machine.scrape()
    assert seen.value("coslice_faults_total", group=GROUP, reason="job_faulted") == 1
    assert seen.value("coslice_refusals_total", group=GROUP, code="job_faulted") == 1
    assert seen.total("coslice_agent_stage_failures_total", group=GROUP, stage="restore") >= 1
    assert seen.value("coslice_agent_operations_total", group=GROUP, outcome="failed") == 1


async def test_everything_exposed_is_in_the_catalog_with_its_labels(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    await take_turns(machine, rounds=3)
    seen = await machine.scrape()
    for sample in seen.samples:
        if sample.name.startswith("process_"):
            continue
        metric = series(sample.name)
        assert metric is not None, sample.name
        assert set(sample.labels) - {"le"} == set(metric.labels), sample
    shown = [(full_name(family), family.type) for family in seen.families]
    assert len(dict(shown)) == len(shown), "a family appears twice"
    kinds = {name: kind for name, kind in shown if not name.startswith("process_")}
    assert kinds == {metric.name: metric.kind for metric in ALL}


def full_name(family: MetricFamily) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def test_the_table_of_the_docs_is_the_catalog() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `coslice_")]
    assert rows == [row(metric) for metric in ALL]


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in ALL:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.kind != "histogram" or metric.name.endswith("_seconds"), metric.name
        assert len(BY_NAME) == len(ALL)
