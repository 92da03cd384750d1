"""The profile format: what a pool says of itself, what a file must be, and how a cycle unrolls."""

import json

import pytest

from coslice.errors import ConfigError
from coslice.profile.cycle import Batches, cycles, solo_seconds
from coslice.profile.model import (
    Durations,
    Phase,
    Pool,
    Profile,
    decode_profile,
    durations,
    encode_profile,
    make_pool,
)


def phase(name: str, values: list[float], *, on: bool, staleness: float | None = None) -> Phase:
    return Phase(
        name=name,
        on=on,
        duration=durations(values),
        coupling="closed" if staleness is None else "buffered",
        staleness=staleness or 0.0,
    )


def trainer(staleness: float | None = None) -> Pool:
    return make_pool(
        "trainer",
        [
            phase("gen", [30.0, 10.0, 20.0], on=False, staleness=staleness),
            phase("reward", [1.0, 1.0, 1.0], on=False),
            phase("update", [9.0, 10.0, 11.0], on=True),
            phase("sync", [2.0, 2.0, 2.0], on=True),
        ],
    )


def test_a_pool_sums_its_phases_cycle_by_cycle() -> None:
    pool = trainer()
    assert pool.period.samples == (42.0, 23.0, 34.0)
    assert pool.busy.mean == pytest.approx(12.0)
    assert pool.duty == pytest.approx(12.0 / 33.0)


def test_durations_keep_means_quantiles_and_order() -> None:
    part = durations([4.0, 1.0, 3.0, 2.0])
    assert part.mean == 2.5
    assert part.samples == (4.0, 1.0, 3.0, 2.0)
    assert part.quantile(0.5) == 2.5
    assert part.quantile(1.0) == 4.0


def test_a_profile_survives_its_file() -> None:
    data = encode_profile(Profile(name="a", pools=(trainer(8.0),)))
    profile = decode_profile(data)
    assert encode_profile(profile) == data
    assert profile.pool("trainer").staleness == 8.0
    assert profile.pool("trainer").period.mean == pytest.approx(trainer().period.mean)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{}", "not a coslice profile"),
        (b"[1]", "not a coslice profile"),
        (b'{"coslice_profile": 9, "name": "a", "pools": []}', "format 9"),
        (b'{"coslice_profile": 1, "name": "a", "pools": []}', "no pools"),
    ],
)
def test_a_foreign_file_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        decode_profile(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "../../up"}, "not a job name"),
        ({"name": "a b"}, "not a job name"),
        ({"accelerators": -1}, "accelerators"),
        ({"nodes": 0}, "nodes are 1 or more"),
        ({"accelerators": 10**18}, "accelerators and nodes are at most 1000000"),
        ({"period": {"mean": 7.0}}, "period: a mean of 7 s, and its phases add up to"),
        ({"busy": {"mean": 1e308}}, "busy: seconds are 0 or more"),
        ({"samples": [-3.0]}, "seconds are 0 or more"),
        ({"samples": [1.0]}, "samples are one per cycle"),
        ({"quantiles": [[0.5, 3.0], [0.2, 1.0]]}, "quantiles ascend"),
        ({"twice": True}, "two pools of one name"),
    ],
)
def test_an_edited_file_is_refused_by_pool_and_field(change: dict[str, object], says: str) -> None:
    """Also what a job sends along with its hello."""
    data = json.loads(encode_profile(Profile(name="a", pools=(trainer(8.0),))))
    (pool,) = data["pools"]
    for key, value in change.items():
        if key == "name":
            data[key] = value
        elif key in ("samples", "quantiles"):
            pool["phases"][0]["duration"][key] = value
        elif key == "twice":
            data["pools"] = [pool, pool]
        else:
            pool[key] = value
    with pytest.raises(ConfigError, match=says):
        decode_profile(json.dumps(data).encode(), path="a.json")


def test_only_one_phase_is_buffered_and_it_is_off() -> None:
    with pytest.raises(ConfigError, match="at most one"):
        make_pool("trainer", [phase("update", [1.0], on=True, staleness=1.0)])


def test_a_cycle_is_off_time_then_a_turn() -> None:
    made = cycles(trainer(), 4)
    assert [(turn.off, turn.on) for turn in made[0].turns] == [(31.0, 11.0)]
    assert made[3] == made[0]  # samples go round
    assert solo_seconds(trainer(), made)[-1] == pytest.approx(42 + 23 + 34 + 42)


def test_a_cycle_that_begins_in_mid_turn_is_rotated() -> None:
    pool = make_pool(
        "trainer",
        [phase("a", [3.0], on=True), phase("wait", [5.0], on=False), phase("b", [4.0], on=True)],
    )
    (cycle,) = cycles(pool, 1)
    assert [(turn.off, turn.on) for turn in cycle.turns] == [(5.0, 7.0)]


def test_two_turns_a_cycle() -> None:
    pool = make_pool(
        "trainer",
        [
            phase("gen", [5.0], on=False),
            phase("logprob", [1.0], on=True),
            phase("reward", [2.0], on=False),
            phase("update", [4.0], on=True),
        ],
    )
    (cycle,) = cycles(pool, 1)
    assert [(turn.off, turn.on) for turn in cycle.turns] == [(5.0, 1.0), (2.0, 4.0)]


@pytest.mark.parametrize("staleness", [0.0, 0.25, 0.5, 1.0, 8.0])
def test_alone_a_buffered_pool_repeats_what_was_measured(staleness: float) -> None:
    pool = trainer(staleness)
    ends = solo_seconds(pool, cycles(pool, 30))
    # From the second round of the samples on: the first batch of all had nothing to overlap with.
    for begin, end in zip(ends[3:], ends[6:], strict=False):
        assert end - begin == pytest.approx(42 + 23 + 34, rel=1e-6)


def test_on_policy_batches_are_made_after_the_step_and_buffered_ones_before() -> None:
    on_policy, ahead = Batches(0.0), Batches(2.0)
    for batches in (on_policy, ahead):
        assert batches.arrives(10.0) == 10.0
        batches.finished(100.0)
    assert on_policy.arrives(10.0) == 110.0
    assert ahead.arrives(10.0) == 20.0
    ahead.finished(120.0)
    assert ahead.arrives(10.0) == 30.0
    ahead.finished(140.0)
    # The fourth batch could only be started when the first step was finished, at 100.
    assert ahead.arrives(10.0) == 110.0


def test_half_a_batch_ahead() -> None:
    batches = Batches(0.5)
    assert batches.arrives(10.0) == 10.0
    batches.finished(50.0)
    assert batches.arrives(10.0) == 55.0


def test_quantiles_are_drawn_from_the_seed_only() -> None:
    spread = Durations(mean=5.0, quantiles=((0.0, 1.0), (1.0, 9.0)))
    pool = make_pool(
        "trainer",
        [
            Phase(name="gen", on=False, duration=spread),
            Phase(name="update", on=True, duration=Durations(mean=2.0)),
        ],
    )
    first, again, other = cycles(pool, 50, seed=1), cycles(pool, 50, seed=1), cycles(pool, 50, seed=2)
    assert first == again != other
    offs = [cycle.turns[0].off for cycle in first]
    assert 1.0 <= min(offs) < max(offs) <= 9.0
