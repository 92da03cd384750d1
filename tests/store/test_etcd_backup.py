"""Backups of what is in a real etcd, and back into it."""

import asyncio
from pathlib import Path

import pytest

from coslice.errors import ConfigError
from coslice.store import Seat, make_election
from coslice.store.backup import read_backup, write_backup
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
    with pytest.raises(ConfigError, match="5 values already"):
        await replace(etcd_location, {}, force=False)
    less = {"group/g0": b"other"}
    assert await replace(etcd_location, less, force=True) == 5
    assert await read(etcd_location) == less
