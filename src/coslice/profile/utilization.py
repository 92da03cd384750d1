"""Records of GPU utilisation: CSV of nvidia-smi or an exporter, ``nvidia-smi dmon``, ``dcgmi dmon``.

A sample counts as busy above ``busy_above`` percent; it stands for the time to the next sample of its device.
Idle gaps up to ``join_s`` belong to the block around them (kernels have pauses), and busy blocks shorter than
``min_busy_s`` are noise. Devices that are busy at the same times are one pool. An accelerator that is busy is
not doing useful work necessarily; it is what an outsider can see.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from coslice.errors import ConfigError
from coslice.profile.model import Phase, Pool, Profile, Role, Source, durations, make_pool
from coslice.profile.options import ReadOptions
from coslice.profile.samples import HOLE, Sample, interval, read_samples
from coslice.profile.steps import trend

_AGREE = 0.95
"""Devices whose samples agree (busy or idle) this often are one pool."""
_NAMED = 8
"""More devices than this are not all in a pool's name."""


class Blocks(Struct, frozen=True):
    """Of one device: whole cycles of (idle before, busy), and what stands in the way of reading more."""

    idle: list[float]
    busy: list[float]
    whole: list[tuple[float, float]]
    """From the first of these cycles' beginning to the end of the last; of each part of the record."""
    holes: int
    """In the record."""


def read_utilization(text: str, name: str, file: str, options: ReadOptions) -> Profile:
    """Raises ``ConfigError`` if the columns are missing or no device has a whole cycle."""
    record = read_samples(text, file, options)
    devices, skipped = record.devices, record.skipped
    read = sum(map(len, devices.values())) + sum(skipped.values())
    notes = [
        f"busy above {options.busy_above:g} %, idle gaps up to {options.join_s:g} s joined, "
        f"busy blocks under {options.min_busy_s:g} s ignored",
        *record.notes,
    ]
    if unknown := sorted(set(options.roles) - set(devices)):
        notes.append(f"--role names GPU {', '.join(unknown)}; the record has {', '.join(sorted(devices))}")
    most = max(sample.util for samples in devices.values() for sample in samples)
    if 0 < most <= 1 and options.busy_above > 1:
        notes.append(f"no sample is above {most:g} %: of shares from 0 to 1 say --busy-above 0.05")
    pools: list[Pool] = []
    for members in _same(devices, options):
        samples = devices[members[0]]
        step = interval(samples)
        begin = samples[0].at + options.warmup * (samples[-1].at - samples[0].at)
        kept = [sample for sample in samples if sample.at >= begin]
        later = sum(_count(devices[member], begin, float("inf")) for member in members)
        skipped[f"warm-up (the first {options.warmup:.0%})"] += (
            sum(len(devices[member]) for member in members) - later
        )
        label = _label(members)
        blocks = _cycles(kept, step, options)
        if not blocks.busy:
            busy = sum(sample.util > options.busy_above for sample in kept) / max(1, len(kept))
            notes.append(
                f"{label}: busy {busy:.1%} of the time, without a whole cycle of idle and busy: no pool"
            )
            skipped["of a device that is no pool"] += later
            continue
        skipped["outside whole cycles"] += later - sum(
            _count(devices[member], first, last) for member in members for first, last in blocks.whole
        )
        if blocks.holes:
            notes.append(
                f"{label}: {blocks.holes} holes in the record, without a sample for more than "
                f"{HOLE * step:g} s; cycles across them are left out"
            )
        if step > options.join_s:
            notes.append(f"{label}: one sample per {step:g} s; shorter blocks cannot be seen")
        nodes = len({record.hosts.get(member, "") for member in members})
        pool = _pool(label, members, blocks, devices, options, nodes)
        pools.append(pool)
        notes += trend(pool)
    if not pools:
        raise ConfigError(f"{file}: no device has a whole cycle of idle and busy. {'; '.join(notes[1:])}")
    skipped = Counter({reason: count for reason, count in skipped.items() if count})
    return Profile(
        name=name,
        pools=tuple(pools),
        source=Source(
            kind="utilization",
            file=file,
            read=read,
            used=read - sum(skipped.values()),
            skipped=dict(skipped),
            notes=tuple(notes),
        ),
    )


def _label(members: Sequence[str]) -> str:
    names = [f"{host}{slash}gpu{index}" for host, slash, index in (m.rpartition("/") for m in members)]
    return "+".join(names) if len(names) <= _NAMED else f"{names[0]}+{len(names) - 1}more"


def _count(samples: Sequence[Sample], first: float, last: float) -> int:
    """So many from ``first`` on and before ``last``."""
    begin, end = (bisect.bisect_left(samples, at, key=lambda sample: sample.at) for at in (first, last))
    return end - begin


def _pool(
    label: str,
    members: Sequence[str],
    blocks: Blocks,
    devices: Mapping[str, Sequence[Sample]],
    options: ReadOptions,
    nodes: int,
) -> Pool:
    role = _role({options.roles[member] for member in members if member in options.roles})
    waits = bool(options.staleness) and role != "sampler"
    return make_pool(
        role,
        [
            Phase(
                name="idle",
                on=False,
                duration=durations(blocks.idle),
                coupling="buffered" if waits else "closed",
                staleness=options.staleness or 0.0 if waits else 0.0,
            ),
            Phase(name="busy", on=True, duration=durations(blocks.busy)),
        ],
        name=label,
        accelerators=len(members),
        nodes=nodes,
        device_bytes=max(sample.memory for member in members for sample in devices[member]),
    )


def _role(named: set[str]) -> Role:
    if named <= {"trainer"} and named:
        return "trainer"
    if named <= {"sampler"} and named:
        return "sampler"
    return "both" if named else "unknown"


# ── blocks ─────────────────────────────────────────────────────────────────


def _same(devices: Mapping[str, Sequence[Sample]], options: ReadOptions) -> list[list[str]]:
    """Devices that are busy together, in the order of the file."""
    groups: list[list[str]] = []
    for device, samples in devices.items():
        for group in groups:
            roles = {options.roles.get(device), options.roles.get(group[0])}
            if len(roles) == 1 and _together(samples, devices[group[0]], options):
                group.append(device)
                break
        else:
            groups.append([device])
    return groups


def _together(one: Sequence[Sample], other: Sequence[Sample], options: ReadOptions) -> bool:
    """By time: one of them may lack a sample, or more."""
    if len(one) > len(other):
        one, other = other, one
    near, agree, seen, place = interval(other), 0, 0, 0
    for sample in one:
        while place + 1 < len(other) and abs(other[place + 1].at - sample.at) <= abs(
            other[place].at - sample.at
        ):
            place += 1
        if abs(other[place].at - sample.at) <= near:
            seen += 1
            agree += (sample.util > options.busy_above) == (other[place].util > options.busy_above)
    return seen >= _AGREE * len(other) and agree >= _AGREE * seen


def _cycles(samples: Sequence[Sample], step: float, options: ReadOptions) -> Blocks:
    """Whole cycles: from the end of one busy block to the end of the next. What was cut off at either end of
    the record, or by a hole in it, is left out."""
    idle: list[float] = []
    busy: list[float] = []
    found: list[tuple[float, float]] = []
    parts = _parts(samples, step)
    for part in parts:
        spans = _busy_spans(part, step, options)
        # The first block may have begun before the record; the last one may go on after it.
        whole = spans[:-1] if spans and spans[-1][1] >= part[-1].at else spans
        for (_, left), (begin, end) in itertools.pairwise(whole):
            idle.append(begin - left)
            busy.append(end - begin)
        if len(whole) > 1:
            found.append((whole[0][1], whole[-1][1]))
    return Blocks(idle, busy, found, len(parts) - 1)


def _parts(samples: Sequence[Sample], step: float) -> list[Sequence[Sample]]:
    parts, start = [], 0
    for number in range(1, len(samples) + 1):
        if number == len(samples) or samples[number].at - samples[number - 1].at > HOLE * step:
            parts.append(samples[start:number])
            start = number
    return [part for part in parts if part]


def _busy_spans(samples: Sequence[Sample], step: float, options: ReadOptions) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    ends = [sample.at for sample in samples[1:]] + [samples[-1].at + step]
    for sample, end in zip(samples, ends, strict=True):
        if sample.util <= options.busy_above:
            continue
        if spans and sample.at - spans[-1][1] <= options.join_s:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((sample.at, end))
    return [(begin, end) for begin, end in spans if end - begin >= options.min_busy_s]
