"""What a job does to an accelerator, measured: one format, and readers for what people already have.

``model`` is the format, ``cycle`` unrolls it in time (simulator and planner call it), ``read`` finds the
right reader for a file. Knows nothing of groups, policies and plans.
"""

from coslice.profile.model import Durations, Phase, Pool, Profile, Source

__all__ = ["Durations", "Phase", "Pool", "Profile", "Source"]
