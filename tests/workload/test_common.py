"""Frozen weights in one copy on the device: who may be in it, and what stays as it was in whoever is."""

import gc
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from workload.nets import digests

from coslice.errors import ConfigError, StateOffloaded
from coslice.workload.adapters import torch_common
from coslice.workload.adapters.torch import TorchAdapter, make_roots
from coslice.workload.adapters.torch_find import in_common
from coslice.workload.buffers import LocalBuffers
from coslice.workload.mover import Mover
from coslice.workload.registry import GroupState, Registration
from coslice.workload.shared import SharedCopy

SIZE = 256 * 256 * 4


class Device:
    """What an agent keeps: by digest."""

    def __init__(self) -> None:
        self.copies: dict[str, int] = {}
        self.users = set[int]()

    def drop(self) -> None:
        """As an agent does when the last one left."""
        for fd in self.copies.values():
            os.close(fd)
        self.copies.clear()


class Lent(LocalBuffers):
    shares_device = True

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def on_device(self, digest: str, size: int, make: Callable[[], int]) -> int:
        copies = self.device.copies
        if digest not in copies:
            copies[digest] = make()
        self.device.users.add(id(self))
        return copies[digest]

    def off_device(self, digest: str, size: int, *, for_good: bool = False) -> None:
        self.device.users.discard(id(self))


class Lora(nn.Module):
    """Two layers of the base are equal, byte for byte."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))
        self.base[2].load_state_dict(self.base[1].state_dict())
        self.lora_a, self.lora_b = nn.Linear(256, 8, bias=False), nn.Linear(8, 256, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.base:
            x = layer(x) + self.lora_b(self.lora_a(x))
        return x


class Job:
    def __init__(self, device: Device, model: Lora, *, verify: bool = False) -> None:
        self.model = model
        adapter = TorchAdapter(make_roots(model, None, None, None), device="host", verify=verify)
        adapter.freeze("share")
        self.state = GroupState("", Mover(), Lent(device))
        self.state.add(Registration("model", [adapter]))

    def leave(self, least: int = 0) -> int:
        return self.state.move_out(wait=0.0, least=least).bytes

    def come(self) -> int:
        return self.state.move_in().copied


@pytest.fixture
def device() -> Device:
    return Device()


def own(model: Lora) -> int:
    return sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)


def test_the_same_tensors_use_it_in_every_job_and_it_is_in_no_figure(device: Device) -> None:
    jobs = [Job(device, Lora()) for _ in range(2)]
    before = digests(jobs[0].model)
    parameters = [list(job.model.parameters()) for job in jobs]
    versions = [p._version for p in parameters[0]]
    for job in jobs:
        assert job.state.measure() == own(job.model) + 3 * SIZE
        job.state.join_if_idle()
        assert job.state.measure() == own(job.model)
    addresses = [[p.data_ptr() for p in job.model.base.parameters()] for job in jobs]
    for _ in range(2):
        for job in jobs:
            assert job.leave() == own(job.model)
            with pytest.raises(StateOffloaded):
                job.model.base[0].weight.sum()
        device.drop()  # made anew from host memory by whoever comes first
        assert [job.come() for job in jobs] == [own(jobs[0].model) + 2 * SIZE, own(jobs[1].model)]
        assert [digests(job.model) for job in jobs] == [before, before]
    assert [[p.data_ptr() for p in job.model.base.parameters()] for job in jobs] == addresses
    assert [list(job.model.parameters()) for job in jobs] == parameters  # compared by identity
    assert [p._version for p in parameters[0]] == versions
    assert len(device.copies) == 1


def test_what_one_job_writes_is_its_own_and_comes_back_to_it_alone(device: Device) -> None:
    jobs = [Job(device, Lora(), verify=True) for _ in range(2)]
    before = digests(jobs[0].model)
    for job in jobs:
        job.state.join_if_idle()
    writer = jobs[0].model
    with torch.no_grad():
        writer.base[1].weight[5, 5] += 1.0  # its equal is another layer's
    merged = digests(writer)
    assert sum(one != other for one, other in zip(merged, before, strict=True)) == 1
    assert digests(jobs[1].model) == before
    assert jobs[0].leave() == own(writer) + SIZE
    jobs[0].come()
    assert [digests(job.model) for job in jobs] == [merged, before]


def test_a_pass_that_waits_for_its_backward_ends_right(device: Device) -> None:
    """What autograd saw of the weights before they were shared keeps them where they are."""
    jobs = [Job(device, Lora()) for _ in range(2)]
    x = torch.randn(4, 256)
    jobs[0].model(x).sum().backward()
    right = [p.grad.clone() for p in jobs[0].model.parameters() if p.grad is not None]
    for job, join_first in zip(jobs, (False, True), strict=True):
        job.model.zero_grad()
        if join_first:
            job.state.join_if_idle()
        out = job.model(x).sum()
        job.state.join_if_idle()
        assert (job.state.measure() == own(job.model)) is join_first
        for _ in range(2):
            job.leave()
            job.come()
        out.backward()
        found = [p.grad for p in job.model.parameters() if p.grad is not None]
        assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


def test_a_part_leaves_without_it(device: Device) -> None:
    """Whoever had a copy of its own until then shares from then on."""
    job = Job(device, Lora())
    before = digests(job.model)
    some = job.leave(least=1)
    assert 0 < some < own(job.model)
    assert job.state.has_common
    assert job.leave(least=own(job.model) - some) == own(job.model) - some
    assert job.state.has_common
    assert job.state.parked_bytes == own(job.model)
    assert job.leave() == 0
    assert not job.state.has_common
    job.come()
    assert digests(job.model) == before


def test_who_registers_it_twice_or_takes_it_back_uses_the_same_tensors(device: Device) -> None:
    job = Job(device, Lora())
    before = digests(job.model)
    job.state.join_if_idle()
    again = TorchAdapter(make_roots(job.model, None, None, None), device="host")
    again.check()
    second = Registration("again", [again])
    job.state.add(second)
    assert job.state.measure() == own(job.model)
    job.leave()
    job.come()
    job.state.remove(second)
    job.state.remove(job.state._registrations[0])
    assert not device.users
    assert digests(job.model) == before
    assert all(p.untyped_storage().resizable() for p in job.model.parameters())


def test_a_storage_with_the_number_of_one_that_is_gone_is_not_taken_for_it(device: Device) -> None:
    """torch names a storage by its address, and malloc hands the same addresses out again."""
    job = Job(device, Lora())
    job.state.join_if_idle()
    numbers = {p.untyped_storage()._cdata for p in job.model.base.parameters()}
    assert len(numbers) == 3
    assert numbers <= set(in_common)
    del job
    gc.collect()
    assert not numbers & set(in_common)
    raw = bytearray(64)
    foreign = [torch.frombuffer(raw, dtype=torch.uint8) for _ in range(1000)]
    same = [tensor for tensor in foreign if tensor.untyped_storage()._cdata in numbers]
    for tensor in same or foreign:
        with pytest.raises(ConfigError, match="also used by numpy"):
            TorchAdapter(make_roots(None, None, tensor, None), device="host").check()


def test_what_is_not_what_its_digest_says_is_not_used(device: Device) -> None:
    first, second, third = (Job(device, Lora()) for _ in range(3))
    before = digests(first.model)
    first.leave()
    first.come()
    ((digest, fd),) = device.copies.items()
    size = os.fstat(fd).st_size
    second.state.join_if_idle()
    second.leave(), first.leave()
    device.drop()
    wrong = SharedCopy.make(size, lambda address: None)
    device.copies[digest] = os.dup(wrong.fd)
    wrong.close()
    assert second.come() == own(second.model) + 3 * SIZE  # from host memory, into memory of its own
    third.state.join_if_idle()
    assert third.state.measure() == own(third.model) + 3 * SIZE
    assert [digests(job.model) for job in (second, third)] == [before, before]
    assert not device.users
    second.leave()
    second.come()
    assert digests(second.model) == before


def test_no_room_on_the_way_leaves_all_as_it_was(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(device, Lora())
    before = digests(job.model)
    write, left = os.pwrite, [2]

    def full(fd: int, data: memoryview, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(fd, data, at)

    monkeypatch.setattr(torch_common.os, "pwrite", full)
    job.state.join_if_idle()
    assert not device.copies
    assert job.state.measure() == own(job.model) + 3 * SIZE
    assert digests(job.model) == before
    left[0] = 1 << 30
    job.state.join_if_idle()
    assert job.state.measure() == own(job.model)
    assert digests(job.model) == before
