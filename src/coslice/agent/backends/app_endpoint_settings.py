"""What an operator may set for the app endpoint, and what is moved by it."""

from msgspec import Struct


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may set (backend ``app_endpoint``)."""

    allow: str = ""
    """``host:port`` beyond loopback that engines may have, separated by spaces."""
    section_wait: float = 30.0
    """How long running requests may take to end, in seconds."""
    move_timeout: float = 120.0
    """For one sleep or wake. 45 s were reported for 48.6 GiB."""
    late: float = 60.0
    """How much longer a move is watched that outlasted its time, before it is judged, in seconds."""
    settle: float = 10.0
    """How long memory may take to be seen as free after the engine said so, in seconds."""
    probe_timeout: float = 60.0
    """For one short generation."""
    checksum: bool = False
    """Also compare the engine's own checksums of its weights, where it offers them. Reads all weights."""
    max_cycles: int = 0
    """Refuse to put an engine to sleep more often than this between restarts; 0: no limit."""


class Target(Struct, frozen=True, kw_only=True):
    """What is moved: the engine of one process of a job. ``key`` names it over restarts of the agent."""

    key: str
    job: str
    url: str
    pid: int
    started: int
    engine: str = ""
    device: str = "host"
    declared: int = 0
    """State in bytes, if the job said it."""
