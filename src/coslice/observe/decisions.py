"""One line of the log for each decision, with its reason: orchestrator's locks and agents' holdings alike.

The level says who should read it: a warning is about something that went wrong for somebody, ``info`` tells
the story of the turns, ``debug`` the rest. Text for people, or with ``--log-format json`` an object a line.
"""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from coslice.core.effects import ReasonCode
from coslice.core.events import MemberGone
from coslice.core.outcome import Step
from coslice.errors import ConfigError
from coslice.security import redact

log = logging.getLogger("coslice.decisions")
FIELDS = "coslice_fields"
"""Attribute of a record: what a JSON line has beside the text."""
LEVELS = ("debug", "info", "warning", "error")
R = ReasonCode
WARNINGS = frozenset(
    {R.JOB_FAULTED, R.BLOCKED, R.NODE_LOST, R.OVERRAN, R.UNCONFIRMED, R.SESSION_EXPIRED, R.KILLED, R.LOST}
)
DETAILS = frozenset(
    {R.JOINED, R.REPEATED, R.NODE_READY, R.PARTLY_YIELDED, R.SNAPSHOT_DEFERRED, R.NODE_CHANGED}
    | {R.STALE, R.FITS, R.MEASURED, R.SESSION_ENDED}
)


def level_of(code: ReasonCode, event: object = None) -> int:
    if code is R.LOST and isinstance(event, MemberGone):
        return logging.INFO  # a process that ended, perhaps as planned, needs its state no more
    if code in WARNINGS:
        return logging.WARNING
    return logging.DEBUG if code in DETAILS else logging.INFO


def tell(where: Mapping[str, object], event: object, step: Step[Any, Any]) -> None:
    """``where``: names of the group and whatever else says whose decision it was."""
    everything = log.isEnabledFor(logging.INFO)
    for reason in step.reasons:
        if not everything and reason.code not in WARNINGS:
            continue
        level = level_of(reason.code, event)
        if log.isEnabledFor(level):
            fields = {**where, "event": type(event).__name__, "reason": reason.code.value}
            if (job := getattr(event, "job", "")) != "":
                fields["job"] = job
            log.log(level, "%s: %s [%s]", where["group"], reason.text, reason.code, extra={FIELDS: fields})


class JsonLines(logging.Formatter):
    """``time`` in UTC, ``level``, ``logger``, ``message``, the fields of a decision, ``error`` with its
    traceback. Every text is redacted on its own, so that a line stays JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        safe = {key: redact.redact(v) if isinstance(v, str) else v for key, v in line.items()}
        return json.dumps(safe, default=lambda value: redact.redact(str(value)))


def set_up(level: str, style: str) -> None:
    """Logging of a server: from ``level`` up, as ``text`` or ``json`` lines. Raises ``ConfigError``."""
    if style not in ("text", "json"):
        raise ConfigError(f"--log-format {style!r}: choose text or json")
    if level not in LEVELS:
        raise ConfigError(f"--log-level {level!r}: choose one of {', '.join(LEVELS)}")
    redact.set_up(getattr(logging, level.upper()), JsonLines() if style == "json" else None)
    for chatty in ("httpx", "httpcore"):  # a line for each request to the Kubernetes API or an etcd
        logging.getLogger(chatty).setLevel(logging.WARNING)
