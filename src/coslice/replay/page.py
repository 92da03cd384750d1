"""Write the replay page: the template, with the journal's replay embedded as JSON. No network, one file."""

import os
import tempfile
from importlib.resources import files
from pathlib import Path

import msgspec

from coslice.errors import ConfigError
from coslice.observe.pages import asset
from coslice.replay.model import build
from coslice.runtime.journal import read_journals

_PLACE = "/*REPLAY-DATA*/null"
_CSS, _JS = "/*DRAWING-CSS*/", "/*DRAWING-JS*/"


def render(journal: str | Path, out: str | Path) -> None:
    """Draw ``journal``, with its predecessors if it was rotated, as the page ``out``, whole or not at all.

    Raises ``ConfigError`` if the file is not a journal, or if the page's folder is not there. A journal cut
    or damaged in the middle is drawn as far as it is whole, and the page says so.
    """
    if not Path(out).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no folder {Path(out).parent}; make it first")
    content = read_journals(Path(journal))
    replay = build(content.header, content.records, torn=content.torn, damaged=content.damaged)
    data = msgspec.json.encode(replay).decode()
    # Inside <script> only "</" can end the data; "<!--" would start a comment state.
    safe = data.replace("</", "<\\/").replace("<!--", "<\\u0021--")
    page = files("coslice.replay").joinpath("page.html").read_text(encoding="utf-8")
    for place, text in ((_CSS, asset("drawing.css")), (_JS, asset("drawing.js")), (_PLACE, safe)):
        if page.count(place) != 1:
            raise RuntimeError(f"page.html has no place for {place}")
        page = page.replace(place, text)
    write_whole(Path(out), page)


def write_whole(out: Path, text: str) -> None:
    """Replace ``out``, whole or not at all; what is no plain file (a pipe, a device, a link) is written."""
    if out.is_symlink() or (out.exists() and not out.is_file()):
        out.write_text(text, encoding="utf-8")
        return
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, out)
    except BaseException:
        os.unlink(temporary)
        raise
