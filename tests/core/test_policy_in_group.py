"""Policies inside the lock: random histories, changes while it runs, and that nobody starves."""

import random

import pytest
from core.group_world import World
from core.test_group_properties import GroupMachine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coslice.core import events as ev
from coslice.core.effects import ReasonCode
from coslice.core.group import Held, Rejected, next_deadline, restarted
from coslice.core.group_state import Resident
from coslice.core.policy import NAMES, policy_named
from coslice.core.story import describe
from coslice.simulate.run import simulate
from coslice.simulate.spec import Job, Pool, Scenario, Stretch, alternating, whole_swap


@pytest.mark.parametrize("name", NAMES)
def test_long_random_walks_keep_every_invariant_also_when_the_policy_changes(name: str) -> None:
    """Clients vanish, nodes fail, the orchestrator restarts; ``holds`` and every step check the invariants,
    ``teardown`` that everybody is served."""
    for seed in range(6):
        dice = random.Random(f"{name}/{seed}")
        machine = GroupMachine()
        machine.start(nodes=dice.randint(1, 2), policy=name, up=True)
        rate = dice.choice([0.0, 0.1, 0.3])
        for _ in range(dice.choice([15, 60])):
            fate = dice.random()
            if fate < 0.02:
                machine.the_orchestrator_restarts()
            elif fate < 0.07:
                machine.time_passes(dice.choice([0.5, 4.0, 11.0, 61.0]))
            elif fate < 0.1:
                spec = dice.choice(["", "priority:class/b=1,max_wait=30", "reservation:idle=1", *NAMES])
                machine.world.apply(ev.PolicySet(at=machine.world.now, policy=spec))
            else:
                dice.choice(machine.trouble() if dice.random() < rate else machine.progress())()
            machine.holds()
        machine.teardown()


def test_a_change_of_policy_counts_from_the_next_decision_and_is_kept_over_a_restart() -> None:
    world = World("n")
    world.attach("n")
    a, b, c = (world.client(name, job=name) for name in "abc")
    world.ask(a)
    world.settle()
    world.ask(b)
    world.ask(c)
    world.apply(ev.PolicySet(at=world.now, policy="priority:class/c=1"))
    assert world.reasons[-1].code is ReasonCode.POLICY_SET
    group = restarted(world.group, world.now)
    assert group.policy == "priority:class/c=1"
    world.confirm(a)
    world.yield_(a)
    world.settle()
    assert c.holding
    world.apply(ev.PolicySet(at=world.now, policy=""))
    assert world.group.policy == ""


def test_a_wrong_policy_changes_nothing() -> None:
    world = World("n")
    before = world.group
    with pytest.raises(Rejected, match="lifo") as refusal:
        world.apply(ev.PolicySet(at=0.0, policy="lifo"))
    assert refusal.value.code == "invalid"
    assert world.group == before


def test_a_group_whose_policy_asks_for_nothing_remembers_nothing() -> None:
    world = World("n")
    world.attach("n")
    a = world.client("a", job="a")
    world.ask(a)
    world.confirm(a)
    world.yield_(a)
    assert world.group.jobs[0].past.turns == 0
    world.apply(ev.PolicySet(at=world.now, policy="least_recent"))
    world.ask(a)
    world.confirm(a)
    world.wait(5.0)
    world.yield_(a)
    assert world.group.jobs[0].past.turns == 1
    assert world.group.jobs[0].past.hold() == 5.0


def _cycle(world: World, name: str, *, hold: float) -> None:
    client = world.clients[name]
    if not client.holding:
        world.ask(client)
        world.settle()
    world.confirm(client)
    world.wait(hold)
    world.yield_(client)
    world.settle()


def test_the_lock_is_kept_for_a_job_that_is_due_and_goes_on_without_it_if_it_is_late() -> None:
    """short has turns of 10 s every 60 s, long one of 200 s; long asks 20 s before short is due."""
    world = World("n", policy=policy_named("least_recent"))
    world.attach("n")
    for name in ("long", "short"):
        world.client(name, job=name)
        _cycle(world, name, hold=200.0 if name == "long" else 10.0)
    for _ in range(2):
        world.wait(50.0)
        _cycle(world, "short", hold=10.0)
    world.ask(world.clients["long"])  # so that its time away is known
    world.settle()
    _cycle(world, "long", hold=200.0)
    _cycle(world, "short", hold=10.0)
    world.apply(ev.PolicySet(at=world.now, policy="reservation:idle=0.5"))
    world.wait(30.0)
    assert next_deadline(world.group) is None
    world.ask(world.clients["long"])
    kept = world.group.reserved
    assert kept is not None
    assert kept.job == "short"
    assert isinstance(world.group.occupancy, Resident)
    assert next_deadline(world.group) == kept.until
    assert any("kept for short" in line for line in describe(world.group, world.now))
    world.wait(kept.until - world.now + 0.001)
    world.settle()
    held = world.group.occupancy
    assert isinstance(held, Held)
    assert held.job == "long"
    assert world.group.reserved is None


SHORT = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
phase = st.floats(1.0, 30.0)


@pytest.mark.parametrize(
    "spec",
    [
        "fifo",
        "least_recent",
        "fewest_swaps:max_wait=60",
        "shortest:ageing=0.2,max_wait=60",
        "fair_share:weight/j0=9,max_wait=60",
        "priority:class/j0=2,class/j1=1,max_wait=60",
        "reservation:idle=1,max_wait=60",
    ],
)
@SHORT
@given(shapes=st.lists(st.tuples(phase, phase), min_size=2, max_size=5))
def test_nobody_waits_longer_than_the_bound_and_one_turn_of_each_of_the_others(
    spec: str, shapes: list[tuple[float, float]]
) -> None:
    """At the bound a waiter goes first but for those that wait even longer: each of them once, and the turn
    that is on. (Fifo and least recent have no bound of their own: there it is 0.) Simulated with all
    invariants checked."""
    jobs = tuple(
        alternating(f"j{i}", on, off if i else 0.0, group="pool") for i, (on, off) in enumerate(shapes)
    )
    swap_s = 1.0
    bound = 0.0 if spec in ("fifo", "least_recent") else 60.0
    bound += sum(on + swap_s for on, _ in shapes)
    report = simulate(
        Scenario(
            pools=(Pool(name="pool"),),
            jobs=jobs,
            cost=whole_swap(swap_s),
            policy=spec,
            until=600.0,
        ),
        judge=True,
    )
    assert report.wait_s.max <= bound + 1e-6


def test_without_its_bound_a_policy_starves_somebody() -> None:
    """That the property above can fail."""
    eager = Job(name="j0", loop=((Stretch(0.0, ""), Stretch(10.0, "pool")),))
    other = alternating("j1", 5.0, 5.0, group="pool")
    third = Job(name="j2", loop=((Stretch(0.0, ""), Stretch(10.0, "pool")),))
    policy = "priority:class/j0=2,class/j2=1,max_wait=1000000"
    jobs = (eager, other, third)
    report = simulate(Scenario(pools=(Pool(name="pool"),), jobs=jobs, policy=policy, until=600.0))
    assert report.jobs.get("j1") is None or report.jobs["j1"].wait.max > 100.0
