"""Secrets do not reach a log: the one place that takes them out of text.

``Redacted`` is the formatter of every process that the command line starts (what it formats includes
arguments and tracebacks); ``logger`` gives code inside training jobs, whose handlers are the job's own, a
logger that redacts before any handler sees the record.
"""

import logging
import re

_HIDDEN = "***"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # Credentials in an address: scheme://user:password@host
    (re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/?#@\"'<>]*@(?=[^\s@])"), rf"\1{_HIDDEN}@"),
    (re.compile(r"\bcoslice1\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+"), f"coslice1.{_HIDDEN}"),
    (re.compile(r"(\b[Bb]earer\s+)[^\s\"',;]+"), rf"\1{_HIDDEN}"),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
        _HIDDEN,
    ),
    (
        re.compile(
            r"(?i)(\b[a-z0-9_.-]*(?:token|secret|passw(?:or)?d|api[_-]?key|incarnation)[\"']?\s*[=:]\s*[\"']?)"
            r"[^\s\"',;&)}]+"
        ),
        rf"\1{_HIDDEN}",
    ),
)
_HINT = re.compile(r"(?i)://|coslice1\.|bearer|private key|token|secret|passw|key|incarnation")


def redact(text: str) -> str:
    """The text without credentials: addresses lose their user part, tokens and keys their value."""
    if _HINT.search(text) is None:
        return text
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


class Redacted(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _Redacting(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


_REDACTING = _Redacting()


def logger(name: str) -> logging.Logger:
    """A logger whose own records are redacted, whoever handles them."""
    found = logging.getLogger(name)
    found.addFilter(_REDACTING)  # again: nothing happens
    return found


def text_lines() -> logging.Formatter:
    """For people: time, level, who, what."""
    return Redacted("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")


def set_up(level: int = logging.WARNING, formatter: logging.Formatter | None = None) -> None:
    """Logging of a process of ours: one line each on standard error. ``formatter`` must redact; again: the
    last call counts."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter or text_lines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
