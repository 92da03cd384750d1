"""Exhaustive walks of small worlds; and that what keeps them small loses nothing."""

from itertools import permutations

import pytest
from msgspec.structs import replace

from coslice.core.group_state import Held
from coslice.proof.alphabet import LETTERS, follow
from coslice.proof.explore import Explorer, Figures
from coslice.proof.explored import GROUP, KINDS, Budget, Explored, Move
from coslice.proof.moves import moves


def explored(*, nodes: int, jobs: int, troubles: int, acquires: int = 2) -> Figures:
    begin = Explored.begin(nodes=nodes, jobs=jobs, acquires=acquires, budget=Budget(together=troubles))
    return Explorer(begin).run()


def test_one_node_and_two_jobs_with_any_trouble_are_sound() -> None:
    figures = explored(nodes=1, jobs=2, troubles=1)
    assert figures.complete
    assert (figures.violations, figures.stuck_states) == (0, 0), figures.stories
    assert figures.states > 1000
    assert figures.waiting_states > 500
    assert set(LETTERS) == {letter for letter, steps in figures.letters.items() if steps}


def test_jobs_that_are_frozen_in_a_phase_are_sound() -> None:
    """With what else may strike a frozen job: crashes, and a stream that breaks."""
    budget = Budget(together=2, pairs=("overruns", "crashes", "losses"))
    begin = Explored.begin(nodes=1, jobs=2, acquires=1, budget=budget, whole=True)
    figures = Explorer(begin).run()
    assert figures.complete
    assert (figures.violations, figures.stuck_states) == (0, 0), figures.stories
    assert figures.letters["holder overruns"] > 50


def test_two_nodes_and_three_jobs_without_trouble_are_sound() -> None:
    figures = explored(nodes=2, jobs=3, troubles=0)
    assert figures.complete
    assert (figures.violations, figures.stuck_states) == (0, 0), figures.stories


def walk(state: Explored, *letters: str) -> Explored:
    """Take the first move of each letter."""
    for letter in letters:
        move = next(m for m in moves(state) if m.name == letter or m.letter == letter)
        state = follow(state, move)
    return state


def begin(**more: int) -> Explored:
    return Explored.begin(nodes=2, jobs=3, acquires=2, budget=Budget(**more))


def test_states_that_differ_by_names_alone_are_the_same() -> None:
    keys = set()
    for one, other in permutations(("j0", "j1", "j2"), 2):
        state = walk(begin(), f"acquire {one}", f"client hears {one}", f"acquire {other}", f"yield {one}")
        keys.add(state.key())
    assert len(keys) == 1
    calm = walk(begin(together=0), "acquire j0", "client hears j0", "acquire j1", "yield j0")
    swapped = {walk(calm, f"command heard {node}").key() for node in ("n0", "n1")}
    assert len(swapped) == 1


def test_names_do_not_matter_for_what_comes_next() -> None:
    """The same situation under other names has the same successors: that is what merging them rests on."""
    found = []
    for one, other in permutations(("j0", "j1", "j2"), 2):
        state = walk(begin(), f"acquire {one}", f"client hears {one}", f"acquire {other}", f"yield {one}")
        found.append(sorted(follow(state, move).key() for move in moves(state)))
    assert all(keys == found[0] for keys in found)


@pytest.mark.parametrize(
    ("nodes", "jobs", "acquires", "kinds"),
    [(2, 2, 2, ()), (1, 3, 1, ("cancels",)), (2, 2, 1, ("failures",)), (1, 2, 1, ("crashes", "deaths"))],
)
def test_taking_names_for_equal_loses_no_state(
    nodes: int, jobs: int, acquires: int, kinds: tuple[str, ...]
) -> None:
    """Walk the world with every name kept apart: no situation that the merged walk has not seen."""
    budget = Budget(together=1, **{kind: 1 if kind in kinds else 0 for kind in KINDS})
    start = Explored.begin(nodes=nodes, jobs=jobs, acquires=acquires, budget=budget)
    explorer = Explorer(start)
    explorer.run()
    seen, todo, situations = {start.key(merge=False)}, [start], {start.key()}
    while todo:
        state = todo.pop()
        for move in moves(state):
            after = follow(state, move)
            name = after.key(merge=False)
            if name not in seen:
                seen.add(name)
                todo.append(after)
                situations.add(after.key())
    assert situations == explorer.keys()
    assert len(seen) > len(situations)


def test_the_order_of_independent_steps_does_not_matter() -> None:
    state = walk(begin(), "acquire j0", "client hears j0", "acquire j1", "yield j0")
    one = walk(state, "command heard n0", "command heard n1")
    other = walk(state, "command heard n1", "command heard n0")
    assert one.key() == other.key()


def test_a_round_trip_comes_back_to_the_same_state() -> None:
    """Epochs, versions and requests grow; the key does not notice."""
    state = walk(begin(), "acquire j0", "client hears j0", "yield j0")
    state.left = (2, 2, 2)
    again = walk(state, "acquire j0", "client hears j0", "yield j0")
    again.left = (2, 2, 2)
    assert again.key() == state.key()
    assert again.world.shell.locks[GROUP].epoch > state.world.shell.locks[GROUP].epoch


def test_what_can_matter_is_in_the_key() -> None:
    state = walk(begin(), "acquire j0")
    known = {state.key()}
    for letters in (("client hears",), ("cancel",), ("client stream breaks",), ("acquire j1",)):
        known.add(walk(state, *letters).key())
    assert len(known) == 5
    poorer = walk(state)
    poorer.budget = replace(state.budget, cancels=0)
    assert poorer.key() not in known


def test_a_broken_lock_is_seen_with_the_shortest_way_to_it() -> None:
    """A lock that grants while a node has not reported."""
    state = walk(begin(), "acquire j0", "client hears j0", "acquire j1", "yield j0")
    group = state.world.shell.locks[GROUP]
    waiter = group.occupancy.waiter
    held = Held(job=waiter.job, incarnation=waiter.incarnation, epoch=group.epoch, since=0.0,
                holders=(), reason=None)  # fmt: skip
    state.world.shell.locks[GROUP] = replace(group, occupancy=held)
    figures = Explorer(state, limit=10, every=1).run()
    assert figures.violations > 0
    assert len(figures.stories[0]) == 2


def test_a_lock_that_never_grants_again_is_seen_as_stuck() -> None:
    """The command of a swap vanishes without anybody noticing."""
    state = walk(begin(together=0), "acquire j0", "client hears j0", "acquire j1", "yield j0")
    for node in state.world.nodes.values():
        node.stream.down.clear()
    figures = Explorer(state).run()
    assert figures.stuck_states > 0
    assert figures.stories[-1][-1].startswith("stuck")


def test_trouble_is_paid_for() -> None:
    state = walk(begin(together=1), "acquire j0")
    assert any(move.trouble for move in moves(state))
    state = follow(state, Move("cancel", "j0", trouble="cancels"))
    assert not any(move.trouble for move in moves(state))
