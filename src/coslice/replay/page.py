"""Write the replay page: the template, with the journal's replay embedded as JSON. No network, one file."""

import os
import tempfile
from importlib.resources import files
from pathlib import Path

import msgspec

from coslice.replay.model import build
from coslice.runtime.journal import read_journal

_PLACE = "/*REPLAY-DATA*/null"


def render(journal: str | Path, out: str | Path) -> None:
    """Draw ``journal`` as the page ``out``, replacing it whole or not at all.

    Raises ``ConfigError`` if the file is not a journal. A journal cut in the middle is drawn as far as it is
    whole, and the page says so.
    """
    content = read_journal(Path(journal))
    replay = build(content.header, content.records, torn=content.torn)
    data = msgspec.json.encode(replay).decode()
    # Inside <script> only "</" can end the data; "<!--" would start a comment state.
    safe = data.replace("</", "<\\/").replace("<!--", "<\\u0021--")
    template = files("coslice.replay").joinpath("page.html").read_text(encoding="utf-8")
    if _PLACE not in template:
        raise RuntimeError("page.html has no place for the data")
    _write(Path(out), template.replace(_PLACE, safe))


def _write(out: Path, text: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, out)
    except BaseException:
        os.unlink(temporary)
        raise
