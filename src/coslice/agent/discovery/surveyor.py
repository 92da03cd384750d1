"""Surveys for the agent: asks the NVML helper, keeps the last answer, logs what devices report.

The helper is started with the first question and again whenever it ended. One that does not answer in time is
left behind; until it comes back every survey says "no information", which is never taken for "idle".
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from coslice.agent.discovery.nvml import Message
from coslice.agent.discovery.survey import XIDS, DeviceEvent, Survey
from coslice.agent.privileged import Helper, HelperGone

log = logging.getLogger(__name__)

MODULE = "coslice.agent.discovery.nvml"


class Surveyor:
    """``last`` is the newest survey. Not for two loops."""

    def __init__(
        self, *, timeout: float = 10.0, on_event: Callable[[DeviceEvent], None] | None = None
    ) -> None:
        """``timeout``: seconds that NVML may take; opening cold devices takes seconds."""
        self._timeout, self._on_event = timeout, on_event
        self._helper: Helper | None = None
        self._asking: asyncio.Task[Survey] | None = None
        self._decode = msgspec.json.Decoder(Message).decode
        self._at = float("-inf")
        self._ecc: dict[str, int] = {}
        self._said = ""
        self._seen = False
        """Has a survey ever shown a device?"""
        self.last = Survey(error="no survey was taken yet")
        self.xids: dict[str, int] = {}
        """The last Xid error of each device, by UUID."""

    @property
    def pid(self) -> int:
        """Of the helper; 0: none runs."""
        return 0 if self._helper is None else self._helper.pid

    async def survey(self, *, max_age: float = 0.0) -> Survey:
        """The state of the devices, at most ``max_age`` seconds old. Never raises; see ``Survey.error``."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._at <= max_age:
            return self.last
        if self._asking is not None and max_age <= 0:
            await asyncio.shield(self._asking)  # that one began before this call: its news may be old
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="survey")
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Survey:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            survey = await self._answer()
        finally:
            self._asking = None
        self._at, self.last = began, survey
        self._watch(survey)
        return survey

    async def _answer(self) -> Survey:
        helper = self._helper
        if helper is not None and helper.busy:
            return Survey(error=f"NVML does not answer (helper {helper.pid})")
        if helper is None or helper.ended.is_set():
            try:
                helper = self._helper = Helper(MODULE, heard=self._heard)
            except OSError as error:
                return Survey(error=f"the NVML helper cannot be started: {error}")
        try:
            async with asyncio.timeout(self._timeout):
                answer = self._decode(await helper.ask(b"survey")).survey
        except TimeoutError:
            return Survey(error=f"NVML did not answer within {self._timeout:g} s (helper {helper.pid})")
        except HelperGone as gone:
            return Survey(error=str(gone))
        assert answer is not None
        return answer

    def _heard(self, message: bytes) -> bytes | None:
        event = self._decode(message).event
        if event is None:
            return message
        self.xids[event.uuid] = event.xid
        meaning = XIDS.get(event.xid, "see NVIDIA's list of Xid errors")
        log.error("device %s reports Xid %d: %s", event.uuid, event.xid, meaning)
        if self._on_event is not None:
            self._on_event(event)
        return None

    def _watch(self, survey: Survey) -> None:
        """Log what has changed: errors come and go once, not with every survey."""
        if survey.error != self._said:
            if survey.error and self._seen:  # a container can lose its devices while it runs
                log.error("devices can no longer be read, and nothing moves there: %s", survey.error)
            elif survey.error:
                log.debug("no information on devices: %s", survey.error)
            elif self._seen:
                log.warning("devices can be read again")
            self._said = survey.error
        self._seen = self._seen or bool(survey.gpus)
        for gpu in survey.gpus:
            errors, before = gpu.ecc_uncorrected or 0, self._ecc.get(gpu.uuid, 0)
            if errors > before:
                log.error(
                    "device %d (%s): %d uncorrected ECC errors, %d of them new: its content may be wrong",
                    gpu.index,
                    gpu.uuid,
                    errors,
                    errors - before,
                )
            self._ecc[gpu.uuid] = errors

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._helper is not None:
            self._helper.close()
