"""Samples of GPU utilisation out of a file: CSV of nvidia-smi or an exporter, ``nvidia-smi dmon``, ``dcgmi
dmon``. Knows columns, units, clocks; ``utilization`` makes blocks of what it returns.

A device is told by its index, else by its UUID, bus or serial number; with several hosts in one file, by its
host too. Times without a zone are read as UTC: what counts is how far apart they are. Where a device's clock
goes back (summer time ends, a record was begun anew) the record is cut, not put into another order; by a few
samples' time it is: two lines were written the other way round.
"""

import csv
import io
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from coslice.errors import ConfigError
from coslice.profile.number import gibibytes
from coslice.profile.options import ReadOptions

_STAMP = re.compile(r"^(timestamp(_?m?s)?|unix.*|ts)$", re.I)
_DATE, _TIME = re.compile(r"^date$", re.I), re.compile(r"^time$", re.I)
_INDEX = re.compile(r"^(gpu([_.]?(index|id))?|index|idx|device|minor_number|entity)$", re.I)
_SERIAL = re.compile(r"^(gpu_)?(uuid|serial|(pci\.)?bus_?id|pci)$", re.I)
_HOST = re.compile(r"^(host(_?name)?|node(_?name)?|(exported_)?instance)$", re.I)
_PART = re.compile(r"^gpu_i_id$", re.I)
"""Of a GPU that is divided (MIG)."""
_UTIL = re.compile(
    r"^(utilization[._]gpu.*|gpu_?util.*|util(_pct|ization)?|sm|gputl|dcgm_fi_dev_gpu_util|"
    r"dcgm_fi_prof_(gr_engine_active|sm_active)|(sm|gr)act)$",
    re.I,
)
_FRACTION = re.compile(r"prof_|act$", re.I)
_MEMORY = re.compile(r"^(memory[._]used.*|(gpu_)?mem(ory)?_used.*|dcgm_fi_dev_fb_used|fb_?used.*)$", re.I)
_ZONE = re.compile(r" [A-Z]{2,5}$")
_CLOCK = re.compile(r"\d\d:\d\d:\d\d(\.\d+)?")
_DAY_ONLY = re.compile(r"\d{4}[-/]\d\d?[-/]\d\d?")
_SINGLE = re.compile(r"(?<![\d.])\d(?!\d)")
"""A digit alone, as spreadsheets write months and hours."""
_LATEST = 1e11
"""Seconds since 1970; no clock is there yet."""
_LOOKS = 64
"""Lines among which the first samples are looked for: a device may have none."""
_DISORDER = 0.01
"""Of a device's samples; more that are long before the one above and the file has another order than time."""
_DAY = 86400.0
HOLE = 10
"""Longer than this many intervals without a sample is a hole in the record, not a long sample."""
_NEEDED = (
    "nvidia-smi --query-gpu=timestamp,index,utilization.gpu,memory.used --format=csv -lms 500 writes "
    "what is needed"
)


class Sample(Struct, frozen=True):
    at: float
    util: float
    memory: int = 0


class Record(Struct, frozen=True):
    """``devices``: in the order of the file; samples in that of time. ``hosts``: of each device, if there are
    several in the file."""

    devices: dict[str, list[Sample]]
    hosts: dict[str, str]
    skipped: Counter[str]
    notes: list[str]


def looks_like_utilization(text: str) -> bool:
    return _table(text) is not None


def read_samples(text: str, file: str, options: ReadOptions) -> Record:
    """Raises ``ConfigError`` if columns are missing, or there is no sample."""
    table = _table(text)
    if table is None:
        raise ConfigError(f"{file}: no columns for device and utilisation in the first lines: {_NEEDED}")
    header, rows = table
    skipped: Counter[str] = Counter()
    notes: list[str] = []
    found = _samples(_Columns(header, options, file), rows, skipped, file)
    devices = {device: _in_order(samples, notes) for device, samples in found.items()}
    several = len({host for host, _, _ in devices}) > 1
    names = _names(list(devices), several, notes)
    if all(device == ("", "", "") for device in devices):
        _one_device(next(iter(devices.values())), file, notes)
    return Record(
        devices={names[device]: samples for device, samples in devices.items()},
        hosts={names[device]: device[0] for device in devices} if several else {},
        skipped=skipped,
        notes=notes,
    )


def interval(samples: Sequence[Sample]) -> float:
    """Seconds from one sample to the next: the median. Clocks of whole seconds give some the same time."""
    gaps = sorted(b.at - a.at for a, b in itertools.pairwise(samples) if b.at > a.at)
    return gaps[len(gaps) // 2] if gaps else 0.0


# ── the table ──────────────────────────────────────────────────────────────


def _table(text: str) -> tuple[list[str], Iterator[list[str]]] | None:
    """Names of the columns and the rows. None: no line among the first twenty is a header we know."""
    lines = text.splitlines()
    for number, line in enumerate(lines[:20]):
        comma = "," in line
        names = [name.lstrip("# ") for name in _split(line, comma)]
        if any(map(_is_util, names)) and (comma or line.lstrip().startswith("#")):
            if not comma:
                names = _dmon_names(names)
            below = lines[number + 1 : number + 1 + _LOOKS]
            if _is_table(names, [_split(row, comma) for row in below]):
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


Device = tuple[str, str, str]
"""Host, index, and serial number where there is no index; empty: the file does not say."""


class _Columns:
    """Where in a row what is. Raises ``ConfigError`` without times."""

    def __init__(self, header: list[str], options: ReadOptions, file: str) -> None:
        self.width = len(header)
        self.util = next(i for i, name in enumerate(header) if _is_util(name))
        self._scale = 100.0 if _FRACTION.search(_plain(header[self.util])) else 1.0
        self._memory = _column(header, _MEMORY)
        self._unit = 1.0 if self._memory is not None and "byte" in header[self._memory].lower() else 2.0**20
        self._entity = header.index("Entity") if "idx" in header and "Entity" in header else None
        self._index = header.index("idx") if self._entity is not None else _column(header, _INDEX)
        self._serial = _column(header, _SERIAL) if self._index is None else None
        self._host, self._part = _column(header, _HOST), _column(header, _PART)
        stamp, date, clock = (_column(header, wanted) for wanted in (_STAMP, _DATE, _TIME))
        self._times = (
            [stamp] if stamp is not None else [place for place in (date, clock) if place is not None]
        )
        self._clock = clock
        self._millis = bool(self._times) and "ms" in header[self._times[0]].lower()
        self._every = options.interval_s
        if not self._times and self._every <= 0:
            raise ConfigError(
                f"{file}: no column of time stamps; say how far apart samples are with --interval-s"
            )

    def device(self, cells: list[str]) -> Device:
        """``nvidia0`` and ``GPU 0`` are 0."""
        index = serial = ""
        if self._index is not None:
            index = re.sub(r"\D", "", cells[self._index]) or cells[self._index]
            if self._entity is not None and cells[self._entity] != "GPU":
                index = f"{cells[self._entity]}-{index}"  # a part of one
            if self._part is not None and cells[self._part]:
                index += f".{cells[self._part]}"
        elif self._serial is not None:
            serial = cells[self._serial]
        return cells[self._host] if self._host is not None else "", index, serial

    def load(self, cells: list[str]) -> float:
        """Per cent. Raises ``ValueError``."""
        value = _number(cells[self.util]) * self._scale
        if not math.isfinite(value):
            raise ValueError(value)
        return value

    def at(self, cells: list[str], number: int) -> float:
        """Seconds since some fixed time. Raises ``ValueError`` or ``OverflowError``."""
        if not self._times:
            return number * self._every
        text = " ".join([cells[place] for place in self._times])
        try:
            value = float(text)
        except ValueError:
            if self._clock is not None and _DAY_ONLY.fullmatch(text):
                text += f" {cells[self._clock]}"
            return _stamp(text)
        if self._millis:
            value /= 1000.0
        elif len(self._times) == 1:
            value /= next((part for part in (1e9, 1e6, 1e3) if value > _LATEST * part / 1e3), 1.0)
        if not abs(value) <= _LATEST:
            raise ValueError(text)
        return value

    def memory(self, cells: list[str]) -> int:
        """Bytes; 0: not known (some devices say ``[N/A]``)."""
        if self._memory is None:
            return 0
        try:
            return int(gibibytes(_number(cells[self._memory]) * self._unit / (1 << 30)) * (1 << 30))
        except ValueError:
            return 0


def _column(header: list[str], wanted: re.Pattern[str]) -> int | None:
    return next((i for i, name in enumerate(header) if wanted.match(_plain(name))), None)


def _number(cell: str) -> float:
    return float(cell.partition(" ")[0].rstrip("%"))


def _stamp(text: str) -> float:
    text = _ZONE.sub("", text).replace("/", "-")
    try:
        read = _date_time(text)
    except ValueError:
        read = _date_time(_SINGLE.sub(r"0\g<0>", text))
    return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()


def _date_time(text: str) -> datetime:
    return datetime.fromisoformat(f"1970-01-01 {text}" if _CLOCK.fullmatch(text) else text)


def _samples(
    columns: _Columns, rows: Iterable[list[str]], skipped: Counter[str], file: str
) -> dict[Device, list[Sample]]:
    """As the file has them."""
    devices: dict[Device, list[Sample]] = defaultdict(list)
    lines: Counter[Device] = Counter()
    strange = ""
    for cells in rows:
        if len(cells) < columns.width:
            if any(cells):
                skipped["incomplete lines"] += 1
            continue
        device = columns.device(cells)
        lines[device] += 1
        try:
            load = columns.load(cells)
        except (ValueError, OverflowError):
            skipped["lines without a number"] += 1
            continue
        try:
            at = columns.at(cells, lines[device] - 1)
        except (ValueError, OverflowError):
            skipped["lines whose time cannot be read"] += 1
            strange = strange or ", ".join(cells)
            continue
        devices[device].append(Sample(at, load, columns.memory(cells)))
    if not devices and strange:
        raise ConfigError(f"{file}: no time stamp can be read, as in {strange[:100]!r}: {_NEEDED}")
    if not devices:
        raise ConfigError(f"{file}: the columns are there, but no line has a sample: {_NEEDED}")
    return dict(devices)


# ── devices and clocks ─────────────────────────────────────────────────────


def _names(devices: Sequence[Device], several: bool, notes: list[str]) -> dict[Device, str]:
    names: dict[Device, str] = {}
    count: Counter[str] = Counter()
    for device in devices:
        host, index, _ = device
        name = index or str(count[host])
        count[host] += 1
        names[device] = f"{host or 'no-host'}/{name}" if several else name
    if unnamed := [f"{names[device]} is {device[2]}" for device in devices if device[2]]:
        notes.append(f"no column has the index of a GPU; by their first lines: {', '.join(unnamed)}")
    return names


def _one_device(samples: Sequence[Sample], file: str, notes: list[str]) -> None:
    """Nothing says which device a sample is of. Is it one? A tool asks all in one go, and then waits."""
    gaps = sorted(b.at - a.at for a, b in itertools.pairwise(samples))
    usual = gaps[len(gaps) * 9 // 10] if gaps else 0.0
    at_once = sum(gap < usual / 10 for gap in gaps)
    if at_once < 0.3 * len(gaps) or at_once == 0:
        return
    if any(sample.at % 1 for sample in samples):
        raise ConfigError(
            f"{file}: samples of several GPUs, and no column says of which: add index to the query. {_NEEDED}"
        )
    notes.append(
        f"{at_once} samples have the time of the one before; if they are of other GPUs, "
        "a column has to say of which"
    )


def _in_order(samples: list[Sample], notes: list[str]) -> list[Sample]:
    """In that of time."""
    if all(one.at <= other.at for one, other in itertools.pairwise(samples)):
        return samples
    in_order = sorted(samples, key=lambda sample: sample.at)
    usual, cut, later = interval(in_order), 0, 0.0
    steps = enumerate(itertools.pairwise(samples), start=1)
    starts = {number for number, (one, other) in steps if one.at - other.at > HOLE * usual}
    if not starts or len(starts) > max(3, _DISORDER * len(samples)):
        return in_order
    found = []
    for number, sample in enumerate(samples):
        if number in starts:
            gone = samples[number - 1].at - sample.at
            if samples[number - 1].at < _DAY and gone > _DAY / 2:
                later += _DAY  # midnight, of times without a date
            else:
                later += gone + 2 * HOLE * usual
                cut += 1
        found.append(replace(sample, at=sample.at + later) if later else sample)
    told = f"the clock goes back {cut} times: the record is cut there"
    if cut and told not in notes:  # of every device the same
        notes.append(told)
    return sorted(found, key=lambda sample: sample.at)
