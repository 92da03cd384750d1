"""What pages are made of. ``drawing`` draws timelines, for the replay page and for the dashboard alike."""

from importlib.resources import files


def asset(name: str) -> str:
    return files("coslice.observe.pages").joinpath(name).read_text(encoding="utf-8")
