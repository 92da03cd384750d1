"""What runs inside a job: registers its state and moves it when the agent asks.

    handle = coslice.workload.register(model=model, optimizer=optimizer)

State moves only outside accelerator sections. While it is away, using a registered tensor, module or
optimizer raises ``StateOffloaded``. That cannot be arranged for what torch does not ask about: views and
``detach()``ed aliases that the job made itself, numpy arrays over a tensor, raw pointers, and C++ that holds
tensors (a pending backward pass, TorchScript). Touching state through those outside a section kills the
process or reads nonsense. A pending backward pass may run once the state is back. A forked child inherits no
registration.

Imports neither torch nor msgspec; torch is used where the job has loaded it.
"""

from coslice.workload.handle import Handle, register

__all__ = ["Handle", "register"]
