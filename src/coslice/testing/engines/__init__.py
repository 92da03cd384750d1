"""Inference servers for tests without a GPU: real processes, real memory, the documented HTTP routes.

Each speaks the routes of its namesake, keeps its "device memory" as anonymous memory of its process, and has
the silent failures that its namesake was reported to have; ``Fault`` switches them on. What they answer to a
prompt depends on every page of their weights, so weights that came back wrong are seen.

    with FakeEngine("vllm", weights=64 << 20) as engine:
        engine.url, engine.pid
        engine.calls()          # what was asked of it
        engine.fault("frees-nothing")

Needs nothing but the standard library.
"""

from coslice.testing.engines.handle import FakeEngine

__all__ = ["FakeEngine"]
