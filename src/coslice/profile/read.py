"""Which reader a file is for. One place knows them all; a file that is none of them is refused by name."""

import codecs
import re
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from coslice.errors import ConfigError
from coslice.profile.journal import looks_like_journal, read_journal_profiles
from coslice.profile.model import Profile, decode_profile
from coslice.profile.options import ReadOptions
from coslice.profile.samples import looks_like_utilization
from coslice.profile.traces import looks_like_steps, read_steps
from coslice.profile.trl import looks_like_trl, read_trl
from coslice.profile.utilization import read_utilization
from coslice.profile.verl import looks_like_verl, read_verl

_PROFILE, _HEAD = '"coslice_profile"', 200
_LONGEST = 60
"""Characters of a name: a job's has 63, and there may be ``-2`` behind it."""
KNOWN = (
    "a coslice profile or journal, a veRL log (step:… timing_s/…), a trainer_state.json or what a trainer "
    "printed ({'step_time': …}), a step file (JSON lines with gen_s, update_actor_s, step_s, …), a record of "
    "GPU utilisation (CSV with a header)"
)


_WITHOUT_HEADER = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}, ")
_IN_FOLDERS = (".csv", ".json", ".jsonl", ".log", ".txt")
"""Endings of files that are looked into there: beside them lie checkpoints."""


class Foreign(ConfigError):
    """Not a file that says how a job uses accelerators."""


def read_profiles(path: Path, options: ReadOptions | None = None, *, name: str = "") -> list[Profile]:
    """The profiles in a file: one, or one per job of a journal. Raises ``ConfigError``, ``Foreign`` for what
    is none of ``KNOWN``."""
    options = options or ReadOptions()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not data.strip():
        raise Foreign(f"{path} is empty")
    if data.startswith(b"\x1f\x8b"):
        raise Foreign(f"{path} is compressed: gunzip it first")
    try:
        return _read(data, path, name or _name(path), options)
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from None


def _read(data: bytes, path: Path, name: str, options: ReadOptions) -> list[Profile]:
    text, file = data.decode(_encoding(data), errors="replace"), str(path)
    if _PROFILE in text[:_HEAD]:
        return [decode_profile(data, path=path)]
    if looks_like_journal(text):
        return read_journal_profiles(file, options)
    if looks_like_verl(text):
        return [read_verl(text, name, file, options)]
    if looks_like_steps(text):
        return [read_steps(text, name, file, options)]
    if looks_like_trl(text):
        return [read_trl(text, name, file, options)]
    if looks_like_utilization(text):
        return [read_utilization(text, name, file, options)]
    if _WITHOUT_HEADER.match(text):
        raise Foreign(
            f"{path} looks like nvidia-smi's CSV without its header: put the names of its columns "
            "above it, as in: timestamp, index, utilization.gpu [%], memory.used [MiB]"
        )
    raise Foreign(f"{path}: not a file that says how a job uses accelerators. Known are: {KNOWN}")


def _encoding(data: bytes) -> str:
    return "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def read_all(
    paths: list[Path], options: ReadOptions | None = None, *, note: Callable[[str], None]
) -> list[Profile]:
    """Of several files and folders, each profile under a name of its own: one that comes twice gets ``-2``,
    ``-3``, … ``note`` hears what of a folder was left out."""

    taken: set[str] = set()
    profiles: list[Profile] = []
    for path in paths:
        for profile in _of_folder(path, options, note) if path.is_dir() else read_profiles(path, options):
            name, number = profile.name, 1
            while name in taken:
                number += 1
                name = f"{profile.name}-{number}"
            taken.add(name)
            profiles.append(profile if name == profile.name else replace(profile, name=name))
    return profiles


def _of_folder(folder: Path, options: ReadOptions | None, note: Callable[[str], None]) -> list[Profile]:
    """Its profiles, which may have been made of the logs beside them; without any, all that can be read."""
    try:
        files = sorted(folder.iterdir())
        known = [file for file in files if file.suffix in _IN_FOLDERS and file.is_file()]
        made = [file for file in known if file.suffix == ".json" and _is_profile(file)]
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}") from None
    profiles, read = [], []
    for file in made or known:
        try:
            profiles += read_profiles(file, options)
            read.append(file)
        except Foreign:
            pass
    used = {*read, *(folder / "index.json" for one in profiles if one.source.kind == "steps")}
    others = [file.name for file in files if file not in used]
    some = ", ".join(others[:6]) + (f" and {len(others) - 6} more" if len(others) > 6 else "")
    if not read:
        raise ConfigError(
            f"{folder}: no profile or record of a job in this folder{f' ({some})' if some else ''}; "
            "coslice profile --out writes profiles"
        )
    if others:
        only = "only its profiles are taken, not" if made else "no record of a job in"
        note(f"{folder}: {only} {some}")
    return profiles


def _is_profile(file: Path) -> bool:
    with file.open("rb") as data:
        return _PROFILE.encode() in data.read(_HEAD)


def _name(path: Path) -> str:
    """The file's name without its ending, as a job's name may be written."""
    stem = path.name.split(".jsonl")[0] if path.name.endswith(".jsonl") else path.stem
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem)[:_LONGEST].strip("-._") or "profile"
