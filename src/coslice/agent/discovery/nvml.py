"""The program that talks to NVML, in a process of its own: ``python -m coslice.agent.discovery.nvml FD``
(``-`` instead of a descriptor: print one survey).

Answers every message with a survey, and sends device events (Xid errors) as they come. Initialises NVML anew
after any error: a container that lost its devices gets them back only so. Knows no jobs.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from coslice.agent.discovery.survey import DeviceEvent, Gpu, Holder, Survey

T = TypeVar("T")
EVENT_WAIT_MS = 1000
TRIES = 3
"""A list of processes that grew while it was read is read again so often."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the two."""

    survey: Survey | None = None
    event: DeviceEvent | None = None


class Nvml:
    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._open = False

    def survey(self) -> Survey:
        """Never raises: what went wrong is in ``error``."""
        try:
            return self._survey()
        except self._nvml.NVMLError as error:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._open = False
            return Survey(error=f"NVML: {error}")

    def _survey(self) -> Survey:
        nvml = self._nvml
        if not self._open:
            nvml.nvmlInit()
            self._open = True
        count = nvml.nvmlDeviceGetCount()
        return Survey(
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=nvml.nvmlSystemGetCudaDriverVersion(),
            gpus=tuple(self._gpu(index) for index in range(count)),
        )

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        holders = self._again(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        clients = self._maybe(lambda: nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)) or ()
        mig = self._maybe(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        persistence = self._maybe(lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
        ecc = self._maybe(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
        return Gpu(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            total=memory.total,
            used=memory.used,
            free=memory.free,
            persistence=None if persistence is None else bool(persistence),
            mig=bool(mig),
            ecc_uncorrected=ecc,
            mps_clients=tuple(client.pid for client in clients),
            holders=tuple(Holder(pid=holder.pid, bytes=holder.usedGpuMemory) for holder in holders),
        )

    def _maybe(self, read: Callable[[], T]) -> T | None:
        """What not every device or driver has."""
        nvml = self._nvml
        absent = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        try:
            return read()
        except nvml.NVMLError as error:
            if error.value in (*absent, nvml.NVML_ERROR_NO_PERMISSION):
                return None
            raise

    def _again(self, read: Callable[[], T]) -> T:
        for _ in range(TRIES - 1):
            with contextlib.suppress(self._nvml.NVMLError_InsufficientSize):
                return read()
        return read()

    def events(self) -> Iterator[DeviceEvent]:
        """Blocks between them; ends where the driver has none to give."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            events = nvml.nvmlEventSetCreate()
            for handle in handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(events, EVENT_WAIT_MS)
            except nvml.NVMLError_Timeout:
                continue
            except nvml.NVMLError:
                return
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                yield DeviceEvent(uuid=_text(nvml.nvmlDeviceGetUUID(event.device)), xid=event.eventData)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def serve(channel: socket.socket) -> None:
    encode = msgspec.json.Encoder().encode
    try:
        nvml = Nvml()
    except ImportError:
        why = Survey(error="nvidia-ml-py is not installed: pip install 'coslice[cuda]'")
        while channel.recv(64):
            channel.send(encode(Message(survey=why)))
        return

    def tell() -> None:
        for event in nvml.events():
            channel.send(encode(Message(event=event)))

    watching = False
    while channel.recv(64):
        survey = nvml.survey()
        channel.send(encode(Message(survey=survey)))
        if survey.gpus and not watching:  # from the first survey on, so that it is not late
            watching = True
            threading.Thread(target=tell, daemon=True).start()


def main() -> None:
    if sys.argv[1] == "-":
        sys.stdout.buffer.write(msgspec.json.encode(Message(survey=Nvml().survey())))
        return
    with socket.socket(fileno=int(sys.argv[1])) as channel, contextlib.suppress(OSError):
        serve(channel)


if __name__ == "__main__":
    main()
