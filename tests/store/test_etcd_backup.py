"""Backups of what is in a real etcd, and back into it."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store.etcd_server import EtcdServer

from coslice.errors import ConfigError
from coslice.store import Seat, make_election, reach
from coslice.store.backup import read_backup, write_backup
from coslice.store.base import StoreError
from coslice.store.etcd_api import EtcdApi
from coslice.store.reach import read, replace

pytestmark = pytest.mark.etcd
VALUES = {f"group/g{number}": bytes([number]) * 1000 for number in range(5)}


async def test_it_is_read_while_another_leads_and_replaced_only_when_nobody_does(
    etcd_location: str, tmp_path: Path
) -> None:
    assert await replace(etcd_location, VALUES, force=False) == 0
    leader = make_election(etcd_location, seat=Seat("127.0.0.1:1", id="leader"), ttl=5)
    try:
        await leader.campaign()
        await asyncio.to_thread(write_backup, tmp_path / "b", await read(etcd_location), force=False)
        assert read_backup(tmp_path / "b") == VALUES
        with pytest.raises(ConfigError, match=r"the orchestrator at 127\.0\.0\.1:1 leads"):
            await replace(etcd_location, {}, force=True)
    finally:
        await leader.close()
    with pytest.raises(
        ConfigError, match=re.escape("the store is not empty (group/g0, group/g1, group/g2, …)")
    ):
        await replace(etcd_location, {}, force=False)
    less = {"group/g0": b"other"}
    assert await replace(etcd_location, less, force=True) == 5
    assert await read(etcd_location) == less


@pytest.fixture
def after_a_page(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """What is to happen as soon as the first page of values is read."""

    def let(happen: Callable[[], None]) -> None:
        monkeypatch.setattr("coslice.store.etcd._PAGE", 2)
        call = EtcdApi.call

        async def calling(
            self: EtcdApi, path: str, body: dict[str, Any], *, timeout: float
        ) -> dict[str, Any]:
            answer = await call(self, path, body, timeout=timeout)
            if "revision" in body:
                await asyncio.to_thread(happen)
            return answer

        monkeypatch.setattr(EtcdApi, "call", calling)

    return let


@pytest.mark.parametrize("away", ["kill", "pause"])
async def test_one_that_goes_away_in_the_middle_of_a_read_is_told_as_soon_as_one_that_never_answered(
    etcd: EtcdServer, after_a_page: Callable[[Callable[[], None]], None], away: str
) -> None:
    await replace(etcd.location(), VALUES, force=False)
    after_a_page(getattr(etcd, away))
    with pytest.raises(StoreError, match=f"{etcd.location()} did not answer within 0.5 s.*--timeout"):
        await read(etcd.location(), patience=0.5)


async def test_one_that_goes_away_in_the_middle_of_a_restore_is_told_with_what_to_do(
    etcd: EtcdServer, after_a_page: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    await replace(etcd.location(), VALUES, force=False)
    monkeypatch.setattr(reach, "DEFAULT_TTL", 2)
    after_a_page(etcd.pause)
    with pytest.raises(StoreError, match=r"went away in the middle .* with --force"):
        await replace(etcd.location(), {}, force=True)
