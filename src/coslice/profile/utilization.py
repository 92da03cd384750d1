"""Records of GPU utilisation: CSV of nvidia-smi or an exporter, ``nvidia-smi dmon``, ``dcgmi dmon``.

A sample counts as busy above ``busy_above`` percent; it stands for the time to the next sample of its device.
Idle gaps up to ``join_s`` belong to the block around them (kernels have pauses), and busy blocks shorter than
``min_busy_s`` are noise. Devices that are busy at the same times are one pool. An accelerator that is busy is
not doing useful work necessarily; it is what an outsider can see.
"""

import csv
import io
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from msgspec import Struct

from coslice.errors import ConfigError
from coslice.profile.model import Phase, Pool, Profile, Role, Source, durations, make_pool
from coslice.profile.number import gibibytes
from coslice.profile.options import ReadOptions
from coslice.profile.steps import trend

_TIME = re.compile(r"^#?\s*(timestamp(_?m?s)?|time|date|unix.*|ts)$", re.I)
_INDEX = re.compile(r"^(gpu(_?(index|id))?|index|idx|device|minor_number|entity)$", re.I)
_UTIL = re.compile(
    r"^(utilization\.gpu.*|gpu_?util.*|util(_pct|ization)?|sm|gputl|dcgm_fi_dev_gpu_util|"
    r"dcgm_fi_prof_(gr_engine_active|sm_active)|(sm|gr)act)$",
    re.I,
)
_FRACTION = re.compile(r"prof_|act$", re.I)
_MEMORY = re.compile(r"^(memory\.used.*|(gpu_)?mem(ory)?_used.*|dcgm_fi_dev_fb_used|fb_?used.*)$", re.I)
_AGREE = 0.95
"""Devices whose samples agree (busy or idle) this often are one pool."""
_LATEST = 1e11
"""Seconds since 1970; no clock is there yet."""
_HOLE = 10
"""Longer than this many intervals without a sample is a hole in the record, not a long sample."""


class Sample(Struct, frozen=True):
    at: float
    util: float
    memory: int = 0


class Blocks(Struct, frozen=True):
    """Of one device: whole cycles of (idle before, busy), and what stands in the way of reading more."""

    idle: list[float]
    busy: list[float]
    samples: int
    """Within these cycles."""
    holes: int
    """In the record."""


def looks_like_utilization(text: str) -> bool:
    return _table(text) is not None


def read_utilization(text: str, name: str, file: str, options: ReadOptions) -> Profile:
    """Raises ``ConfigError`` if the columns are missing or a device has no whole cycle."""
    table = _table(text)
    if table is None:
        raise ConfigError(f"{file}: no columns for device and utilisation in the first lines: {_needed()}")
    header, rows = table
    skipped: Counter[str] = Counter()
    devices = _samples(header, rows, options, skipped, file)
    read = sum(map(len, devices.values())) + sum(skipped.values())
    notes = [
        f"busy above {options.busy_above:g} %, idle gaps up to {options.join_s:g} s joined, "
        f"busy blocks under {options.min_busy_s:g} s ignored"
    ]
    if unknown := sorted(set(options.roles) - set(devices)):
        notes.append(f"--role names GPU {', '.join(unknown)}; the record has {', '.join(sorted(devices))}")
    pools: list[Pool] = []
    for members in _same(devices, options):
        samples = devices[members[0]]
        interval = _interval(samples)
        begin = samples[0].at + options.warmup * (samples[-1].at - samples[0].at)
        kept = [sample for sample in samples if sample.at >= begin]
        skipped[f"warm-up (the first {options.warmup:.0%})"] += (len(samples) - len(kept)) * len(members)
        label = "+".join(f"gpu{member}" for member in members)
        blocks = _cycles(kept, interval, options)
        if not blocks.busy:
            busy = sum(sample.util > options.busy_above for sample in kept) / max(1, len(kept))
            notes.append(
                f"{label}: busy {busy:.1%} of the time, without a whole cycle of idle and busy: no pool"
            )
            skipped["of a device that is no pool"] += len(kept) * len(members)
            continue
        skipped["outside whole cycles"] += (len(kept) - blocks.samples) * len(members)
        if blocks.holes:
            notes.append(
                f"{label}: {blocks.holes} holes in the record, without a sample for more than "
                f"{_HOLE * interval:g} s; cycles across them are left out"
            )
        if interval > options.join_s:
            notes.append(f"{label}: one sample per {interval:g} s; shorter blocks cannot be seen")
        pool = _pool(label, members, blocks, devices, options)
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


def _pool(
    label: str,
    members: Sequence[str],
    blocks: Blocks,
    devices: Mapping[str, Sequence[Sample]],
    options: ReadOptions,
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
        device_bytes=max(sample.memory for member in members for sample in devices[member]),
    )


def _role(named: set[str]) -> Role:
    if named <= {"trainer"} and named:
        return "trainer"
    if named <= {"sampler"} and named:
        return "sampler"
    return "both" if named else "unknown"


# ── the file ───────────────────────────────────────────────────────────────


def _table(text: str) -> tuple[list[str], Iterator[list[str]]] | None:
    """Names of the columns and the rows. None: no line among the first twenty is a header we know."""
    lines = text.splitlines()
    for number, line in enumerate(lines[:20]):
        comma = "," in line
        names = _split(line, comma)
        if any(map(_is_util, names)) and (comma or line.lstrip().startswith("#")):
            if not comma:
                names = _dmon_names(names)
            if _is_table(names, [_split(row, comma) for row in lines[number + 1 : number + 4]]):
                return names, (_split(row, comma) for row in lines[number + 1 :])
    return None


def _is_table(names: list[str], rows: list[list[str]]) -> bool:
    """A sentence may name columns; under a header there are as many cells, with a number for utilisation."""
    util = next(i for i, name in enumerate(names) if _is_util(name))
    return any(len(row) >= len(names) and re.match(r"[\d.]+", row[util]) for row in rows)


def _split(line: str, comma: bool) -> list[str]:
    if comma and '"' not in line:
        return [cell.strip() for cell in line.split(",")]
    if comma:
        return [cell.strip() for cell in next(csv.reader(io.StringIO(line)), [])]
    return line.replace("#", " ").split()


def _dmon_names(names: list[str]) -> list[str]:
    # dcgmi writes "GPU 0" under one heading.
    return ["Entity", "idx", *names[1:]] if names[0] == "Entity" else names


def _is_util(name: str) -> bool:
    return _UTIL.match(_plain(name)) is not None


def _plain(name: str) -> str:
    return name.split("[")[0].strip()


def _needed() -> str:
    return (
        "nvidia-smi --query-gpu=timestamp,index,utilization.gpu,memory.used --format=csv -lms 500 writes "
        "what is needed"
    )


def _samples(
    header: list[str],
    rows: Iterable[list[str]],
    options: ReadOptions,
    skipped: Counter[str],
    file: str,
) -> dict[str, list[Sample]]:
    util = next(i for i, name in enumerate(header) if _is_util(name))
    index = _column(header, _INDEX) if "idx" not in header else header.index("idx")
    memory = _column(header, _MEMORY)
    times = [i for i, name in enumerate(header) if _TIME.match(_plain(name))]
    scale = 100.0 if _FRACTION.search(_plain(header[util])) else 1.0
    if not times and options.interval_s <= 0:
        raise ConfigError(
            f"{file}: no column of time stamps; say how far apart samples are with --interval-s"
        )
    devices: dict[str, list[Sample]] = defaultdict(list)
    for cells in rows:
        if len(cells) < len(header):
            if any(cells):
                skipped["incomplete lines"] += 1
            continue
        try:
            device = re.sub(r"\D", "", cells[index]) or cells[index] if index is not None else "0"
            value = _number(cells[util]) * scale
            known = devices[device]
            at = (
                _at([cells[i] for i in times], header[times[0]]) if times else len(known) * options.interval_s
            )
            if not (math.isfinite(value) and abs(at) <= _LATEST):
                raise ValueError(value, at)
            known.append(Sample(at, value, _bytes(cells, header, memory)))
        except (ValueError, OverflowError):
            skipped["lines without a number"] += 1
    for device in [device for device, samples in devices.items() if not samples]:
        del devices[device]
    if not devices:
        raise ConfigError(f"{file}: the columns are there, but no line has a sample: {_needed()}")
    for samples in devices.values():
        samples.sort(key=lambda sample: sample.at)
    return dict(devices)


def _column(header: list[str], wanted: re.Pattern[str]) -> int | None:
    return next((i for i, name in enumerate(header) if wanted.match(_plain(name))), None)


def _number(cell: str) -> float:
    return float(cell.partition(" ")[0].rstrip("%"))


def _bytes(cells: list[str], header: list[str], column: int | None) -> int:
    """0: not known (some devices say ``[N/A]``)."""
    if column is None:
        return 0
    unit = 1.0 if "byte" in header[column].lower() else float(1 << 20)
    try:
        return int(gibibytes(_number(cells[column]) * unit / (1 << 30)) * (1 << 30))
    except ValueError:
        return 0


def _at(cells: list[str], name: str) -> float:
    """Seconds since some fixed time."""
    text = " ".join(cells)
    try:
        value = float(text)
    except ValueError:
        for form in ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y%m%d %H:%M:%S"):
            try:
                return datetime.strptime(text, form).timestamp()
            except ValueError:
                continue
        return datetime.fromisoformat(text).timestamp()
    return value / 1000.0 if "ms" in name.lower() or value > 1e11 else value


# ── blocks ─────────────────────────────────────────────────────────────────


def _interval(samples: Sequence[Sample]) -> float:
    gaps = sorted(b.at - a.at for a, b in itertools.pairwise(samples))
    return gaps[len(gaps) // 2] if gaps else 0.0


def _same(devices: Mapping[str, Sequence[Sample]], options: ReadOptions) -> list[list[str]]:
    """Devices that are busy together, in the order of the file."""
    groups: list[list[str]] = []
    for device, samples in devices.items():
        for group in groups:
            other = devices[group[0]]
            pairs = list(zip(samples, other, strict=False))
            agree = sum((a.util > options.busy_above) == (b.util > options.busy_above) for a, b in pairs)
            roles = {options.roles.get(device), options.roles.get(group[0])}
            if len(samples) == len(other) and agree >= _AGREE * len(pairs) and len(roles) == 1:
                group.append(device)
                break
        else:
            groups.append([device])
    return groups


def _cycles(samples: Sequence[Sample], interval: float, options: ReadOptions) -> Blocks:
    """Whole cycles: from the end of one busy block to the end of the next. What was cut off at either end of
    the record, or by a hole in it, is left out."""
    idle: list[float] = []
    busy: list[float] = []
    count, parts = 0, _parts(samples, interval)
    for part in parts:
        spans = _busy_spans(part, interval, options)
        # The first block may have begun before the record; the last one may go on after it.
        whole = spans[:-1] if spans and spans[-1][1] >= part[-1].at else spans
        for (_, left), (begin, end) in itertools.pairwise(whole):
            idle.append(begin - left)
            busy.append(end - begin)
        if len(whole) > 1:
            count += sum(whole[0][1] <= sample.at < whole[-1][1] for sample in part)
    return Blocks(idle, busy, count, len(parts) - 1)


def _parts(samples: Sequence[Sample], interval: float) -> list[Sequence[Sample]]:
    parts, start = [], 0
    for number in range(1, len(samples) + 1):
        if number == len(samples) or samples[number].at - samples[number - 1].at > _HOLE * interval:
            parts.append(samples[start:number])
            start = number
    return [part for part in parts if part]


def _busy_spans(
    samples: Sequence[Sample], interval: float, options: ReadOptions
) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    ends = [sample.at for sample in samples[1:]] + [samples[-1].at + interval]
    for sample, end in zip(samples, ends, strict=True):
        if sample.util <= options.busy_above:
            continue
        if spans and sample.at - spans[-1][1] <= options.join_s:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((sample.at, end))
    return [(begin, end) for begin, end in spans if end - begin >= options.min_busy_s]
