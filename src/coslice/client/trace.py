"""The caller's part of a trace: a span around each acquire, if the job traces itself.

Only where the job has loaded ``opentelemetry`` already; nothing is imported for it. The orchestrator's spans
of the hand-over, and the agents', become children of this one (W3C Trace Context).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coslice.client.session import Claim


@contextmanager
def acquiring(claim: Claim) -> Iterator[None]:
    """While the claim is waited for."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or not hasattr(api, "get_tracer"):
        yield
        return
    attributes = {"coslice.groups": claim.groups, "coslice.phase": claim.phase}
    tracer = api.get_tracer("coslice")
    with tracer.start_as_current_span("coslice.client.acquire", attributes=attributes) as span:
        at = span.get_span_context()
        if at.is_valid:
            claim.traceparent = f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"
        yield
