"""A cancellation that gRPC loses.

``grpc.aio`` swallows one that reaches a task while the stream that it reads is being set up, and raises what
became of the stream instead. A loop that dials again after that would outlive whoever waits for its end.
"""

import asyncio


def raise_if_cancelled() -> None:
    """``CancelledError`` if the current task was asked to end; for a loop over streams, after each one."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
