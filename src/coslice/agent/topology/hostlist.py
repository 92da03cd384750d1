"""Slurm's short form of many host names: ``gpu[01-03,7],login`` is gpu01 gpu02 gpu03 gpu7 login. Pure.

As ``scontrol show hostnames`` expands it (https://slurm.schedmd.com/scontrol.html).
"""

import itertools
import re
from collections.abc import Iterator

MAX_HOSTS = 65536
"""Slurm's own bound on one list."""
_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> tuple[str, ...]:
    """In the order written. Raises ``ValueError`` saying what is wrong."""
    hosts: list[str] = []
    for word in _words(text.strip()):
        for host in _expanded(word):
            hosts.append(host)
            if len(hosts) > MAX_HOSTS:
                raise ValueError(f"{text[:80]!r} names more than {MAX_HOSTS} hosts")
    return tuple(hosts)


def _words(text: str) -> Iterator[str]:
    """At commas outside of brackets."""
    if not text:
        return
    for word in re.split(r",(?![^\[\]]*\])", text):
        if not word or re.search(r"\s", word):
            raise ValueError(f"{text!r} is no list of hosts: a name is empty, or holds a space")
        yield word


def _expanded(word: str) -> Iterator[str]:
    pieces = _PART.split(word)  # text, range, text, range, …, text
    if any("[" in piece or "]" in piece for piece in pieces[::2]):
        raise ValueError(f"{word!r} is no list of hosts: its brackets do not match")
    choices = [[piece] if at % 2 == 0 else _numbers(piece, word) for at, piece in enumerate(pieces)]
    return ("".join(parts) for parts in itertools.product(*choices))


def _numbers(text: str, word: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ValueError(f"{word!r} is no list of hosts: {part!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= MAX_HOSTS:
            raise ValueError(f"{word!r} names more than {MAX_HOSTS} hosts")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
