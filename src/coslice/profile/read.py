"""Which reader a file is for. One place knows them all; a file that is none of them is refused by name."""

from pathlib import Path

from msgspec.structs import replace

from coslice.core.ids import check_name
from coslice.errors import ConfigError
from coslice.profile.journal import looks_like_journal, read_journal_profiles
from coslice.profile.model import Profile, decode_profile
from coslice.profile.options import ReadOptions
from coslice.profile.traces import looks_like_steps, read_steps
from coslice.profile.trl import looks_like_trl, read_trl
from coslice.profile.utilization import looks_like_utilization, read_utilization
from coslice.profile.verl import looks_like_verl, read_verl

KNOWN = (
    "a coslice profile or journal, a veRL log (step:… timing_s/…), a trainer_state.json, a step file (JSON "
    "lines with gen_s, update_actor_s, step_s, …), a record of GPU utilisation (CSV with a header)"
)


def read_profiles(path: Path, options: ReadOptions | None = None, *, name: str = "") -> list[Profile]:
    """The profiles in a file: one, or one per job of a journal. Raises ``ConfigError``."""
    options = options or ReadOptions()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not data.strip():
        raise ConfigError(f"{path} is empty")
    text = data.decode("utf-8", errors="replace")
    name, file = name or _name(path), str(path)
    if '"coslice_profile"' in text[:200]:
        profile = decode_profile(data, path=path)
        return [profile]
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
    raise ConfigError(f"{path}: not a file that says how a job uses accelerators. Known are: {KNOWN}")


def read_all(paths: list[Path], options: ReadOptions | None = None) -> list[Profile]:
    """Of several files, each profile under a name of its own: one that comes twice gets ``-2``, ``-3``, …"""

    taken: set[str] = set()
    profiles: list[Profile] = []
    for path in paths:
        for profile in read_profiles(path, options):
            name, number = profile.name, 1
            while name in taken:
                number += 1
                name = f"{profile.name}-{number}"
            taken.add(name)
            profiles.append(profile if name == profile.name else replace(profile, name=name))
    return profiles


def _name(path: Path) -> str:
    """The file's name without its ending, as a job's name may be written."""
    stem = path.name.split(".jsonl")[0] if path.name.endswith(".jsonl") else path.stem
    clean = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("-.") or "profile"
    try:
        return check_name("job", clean)
    except ValueError:
        return clean[:60]
