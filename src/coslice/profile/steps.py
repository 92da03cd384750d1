"""Rows of phase times, one per training step, made into pools. The readers of logs call it.

The table says of each timer whether the trainer's accelerators are needed. Generation decides the shape of a
job: in a colocated one it runs on the trainer's accelerators, in a disaggregated one it is what the trainer
waits for. What a step took beyond its timers is the phase ``other`` and counts as on: nobody can show that it
is idle.
"""

from collections.abc import Mapping, Sequence

from coslice.errors import ConfigError
from coslice.profile.model import Phase, Pool, durations, make_pool
from coslice.profile.options import ReadOptions

Row = Mapping[str, float]
"""Timer → seconds. ``step``: the whole step, where it was measured."""

# timer → (our word for it, on the trainer's accelerators?); None: on where generation is, i.e. if colocated.
# In the order in which a step runs them. Names as the trainers' logs have them.
TIMERS: dict[str, tuple[str, bool | None]] = {
    "wait_prev_gen": ("generate", None),
    "gen": ("generate", None),
    "generate": ("generate", None),
    "gen_max": ("generate", None),
    "reward": ("reward", False),
    "old_log_prob": ("train", True),
    "ref": ("train", True),
    "values": ("train", True),
    "adv": ("train", True),
    "update_critic": ("train", True),
    "update_actor": ("train", True),
    "train": ("train", True),
    "param_sync": ("weight_sync", True),
    "sync_rollout_weights": ("weight_sync", True),
    "update_weights": ("weight_sync", True),
    "weight_sync": ("weight_sync", True),
    "testing": ("eval", None),
    "save_checkpoint": ("save", True),
}
NESTED = {"generate_sequences", "reshard", "generation_timing", "agent_loop"}
"""Timers inside others: they add nothing to a step."""
NO_TIME = "with a time that is none (negative, endless, no number)"
"""Why a line is left out, whole: a step without one of its times would look shorter than it was."""
SHORT = 0.005
"""Off-time of less than this share of a step is not worth a yield, and counts as on."""


def trainer_pool(
    rows: Sequence[Row],
    options: ReadOptions,
    *,
    disaggregated: bool,
    staleness: float | None = None,
    state_bytes: int = 0,
    device_bytes: int = 0,
    accelerators: int = 0,
) -> tuple[Pool, list[str]]:
    """The pool of the trainer (role ``both`` if colocated), and what is to be said about it.

    Raises ``ConfigError`` if nothing in the rows uses accelerators.
    """
    if options.shape != "auto":
        disaggregated = options.shape == "disaggregated"
    if options.staleness is not None:
        staleness = options.staleness
    rows, notes = rows[options.skip_first :], []
    if options.skip_first:
        notes.append(f"the first {options.skip_first} steps are left out, as asked")
    if not rows:
        raise ConfigError(f"no step is left after the first {options.skip_first}: lower --skip-first")
    names, unused = _timers(rows)
    if unused:
        notes.append(f"timers within others, not counted again: {', '.join(sorted(unused))}")
    step_mean = _mean([_total(row, names) for row in rows])
    buffered = disaggregated and bool(staleness)
    phases: list[Phase] = []
    for name in names:
        word, on = TIMERS.get(name, ("", True))
        on = not disaggregated if on is None else on
        values = [max(0.0, row.get(name, 0.0)) for row in rows]
        if not on and not disaggregated and _mean(values) < SHORT * step_mean:
            on = True
        waits = (
            buffered and word == "generate" and not on and not any(p.coupling == "buffered" for p in phases)
        )
        phases.append(
            Phase(
                name=name,
                phase=word,
                on=on,
                duration=durations(values),
                occurs=sum(name in row for row in rows),
                coupling="buffered" if waits else "closed",
                staleness=staleness or 0.0 if waits else 0.0,
            )
        )
    other = [row.get("step", 0.0) - sum(row.get(name, 0.0) for name in names) for row in rows]
    if any(value > 0 for value in other):
        phases.append(Phase(name="other", on=True, duration=durations([max(0.0, value) for value in other])))
        if _mean([max(0.0, value) for value in other]) > 0.02 * step_mean:
            notes.append("'other' is what the log does not explain of a step: counted as on the accelerators")
    if (over := sum(value < -0.01 * step_mean for value in other)) and any("step" in row for row in rows):
        notes.append(f"in {over} of {len(rows)} steps the timers add up to more than the step: they overlap")
    pool = make_pool(
        "trainer" if disaggregated else "both",
        phases,
        accelerators=options.accelerators or accelerators,
        state_bytes=state_bytes,
        device_bytes=device_bytes,
    )
    if disaggregated and staleness is None:
        notes.append(
            "staleness is not known: taken as on-policy (closed); say --staleness N if batches queue up"
        )
    return pool, notes + trend(pool)


def trend(pool: Pool) -> list[str]:
    """A word on drift, if the last third of the record differs from the first: a mean describes neither."""
    samples, third = pool.period.samples, len(pool.period.samples) // 3
    if third < 3:
        return []
    first, last = _mean(samples[:third]), _mean(samples[-third:])
    if first <= 0 or 0.8 <= last / first <= 1.25:
        return []
    return [f"the {pool.label} drifts: cycles of the last third take {last / first:.2f} x those of the first"]


def nested(timer: str) -> bool:
    """Is it a part of another timer?"""
    return "/" in timer or timer in NESTED


def _timers(rows: Sequence[Row]) -> tuple[list[str], set[str]]:
    """Timers that make up a step, in its order; and those that lie within others."""
    present = {name: None for row in rows for name in row if name != "step"}
    names = [name for name in TIMERS if name in present]
    unused = {name.split("/")[0] for name in present if nested(name)}
    for name in present:
        if name in TIMERS or nested(name):
            continue
        # A timer we do not know: part of the step if the step has room for it.
        room = _mean([row.get("step", 0.0) - sum(row.get(other, 0.0) for other in names) for row in rows])
        if _mean([row.get(name, 0.0) for row in rows]) <= max(room, 0.0) * 1.01 + 1e-3:
            names.append(name)
        else:
            unused.add(name)
    return names, unused


def _total(row: Row, names: Sequence[str]) -> float:
    return row.get("step") or sum(row.get(name, 0.0) for name in names)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
