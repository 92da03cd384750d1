"""What the process that is forked has loaded. The collector leaves it alone, or every fork would copy it."""

import gc

import torch._dynamo  # noqa: F401  (by the first step of DDP and of some optimizers)

import coslice.agent.app
import coslice.orchestrator.app
import coslice.workload  # noqa: F401

gc.collect()
gc.freeze()
