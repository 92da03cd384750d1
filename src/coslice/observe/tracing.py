"""Spans of OpenTelemetry, without a word of it elsewhere: the extra ``otel``, off unless asked for.

A trace is one hand-over: the caller's acquire, the orchestrator's queue, swap and grant, each agent's stages.
Parents travel as W3C Trace Context (``traceparent``) in the messages that are sent anyway.
"""

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coslice.errors import ConfigError
from coslice.security.redact import redact

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer, TracerProvider

log = logging.getLogger(__name__)
FAREWELL_S = 2.0
MAX_PARENT = 64
"""A traceparent of version 00 has 55 characters; what is longer is no parent."""
Attributes = Mapping[str, str | int | float | bool]


class Span:
    """Ends once; ending again changes nothing."""

    def __init__(self, span: "OtelSpan", tracing: "Tracing") -> None:
        self._span, self._tracing, self._ended = span, tracing, False

    def child(self, name: str, attributes: Attributes | None = None) -> "Span":
        return self._tracing.begin(name, self.traceparent, attributes)

    @property
    def traceparent(self) -> str:
        at = self._span.get_span_context()
        return f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"

    def end(self, attributes: Attributes | None = None, *, error: str = "") -> None:
        """``error``: what it failed of."""
        if self._ended:
            return
        self._ended = True
        if attributes:
            self._span.set_attributes(dict(attributes))
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, redact(error)))
        self._span.end()


class Tracing:
    def __init__(self, provider: "TracerProvider") -> None:
        self._tracer: Tracer = provider.get_tracer("coslice")

    def begin(self, name: str, parent: str = "", attributes: Attributes | None = None) -> Span:
        """``parent``: a traceparent; empty or malformed: a trace of its own."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": parent} if 0 < len(parent) <= MAX_PARENT else {}
        context = TraceContextTextMapPropagator().extract(carrier)
        return Span(self._tracer.start_span(name, context=context, attributes=dict(attributes or {})), self)


class Exporting(Tracing):
    """Sends spans to a collector over OTLP (gRPC), in the background; one that is away costs spans only."""

    def __init__(self, endpoint: str, *, service: str) -> None:
        """``endpoint``: http://host:4317, or https. Raises ``ConfigError``."""
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp {redact(endpoint)!r}: write http://HOST:PORT, for example http://127.0.0.1:4317"
            )
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"--otlp needs OpenTelemetry ({error.name} is missing): pip install 'coslice[otel]'"
            ) from None
        resource = Resource.create({"service.name": service})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        super().__init__(self._provider)

    def close(self) -> None:
        """Sends what is left. Blocks, for ``FAREWELL_S`` at most: nobody may be there to take it."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(FAREWELL_S)
