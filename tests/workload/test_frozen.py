"""Frozen parameters need no host copy of their own: they are read again, or one copy serves several."""

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from workload.nets import digests

from coslice.errors import ConfigError, OperationFailed, StateLost
from coslice.gate import GATE
from coslice.workload.buffers import identity
from coslice.workload.shared import SharedCopy, is_sealed

BASE, ADAPTER = 2 * 256 * 256 * 4, 2 * 256 * 8 * 4


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(2))
        self.lora_a, self.lora_b = nn.Linear(256, 8, bias=False), nn.Linear(8, 256, bias=False)
        self.base.requires_grad_(False)


@pytest.fixture
def model() -> Lora:
    torch.manual_seed(3)
    return Lora()


def safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    about, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        about[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    header = json.dumps(about | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def weights(model: Lora) -> dict[str, torch.Tensor]:
    return {f"other.{name}": value.clone() for name, value in model.base.state_dict().items()}


def in_safetensors(model: Lora, folder: Path) -> Any:
    return safetensors(folder / "base.safetensors", {"unused": torch.ones(5)} | weights(model))


def in_a_torch_file(model: Lora, folder: Path) -> Any:
    torch.save(weights(model), folder / "base.pt")
    return str(folder / "base.pt")


def in_a_folder(model: Lora, folder: Path) -> Any:
    for number, (name, value) in enumerate(weights(model).items()):
        safetensors(folder / f"part-{number}.safetensors", {name: value})
    return folder


def by_a_function(model: Lora, folder: Path) -> Any:
    kept = weights(model)
    return lambda: kept


def by_a_generator(model: Lora, folder: Path) -> Any:
    kept = weights(model)

    def load() -> Iterator[tuple[str, torch.Tensor]]:
        yield from kept.items()

    return load


SOURCES = [in_safetensors, in_a_torch_file, in_a_folder, by_a_function, by_a_generator]


@pytest.mark.parametrize("source", SOURCES)
def test_dropped_weights_are_read_again_and_take_no_host_memory(
    source: Callable[[Lora, Path], Any], model: Lora, tmp_path: Path, registered: Any
) -> None:
    before = digests(model)
    handle = registered(model, frozen="drop", reread=source(model, tmp_path))
    for _ in range(2):
        assert handle.offload() == BASE + ADAPTER
        assert handle._group.state.buffers.current.size == ADAPTER
        assert handle.restore() == BASE + ADAPTER
        assert digests(model) == before


def test_a_region_of_dropped_weights_alone_needs_no_buffer_at_all(
    model: Lora, tmp_path: Path, registered: Any
) -> None:
    before = digests(model)
    handle = registered(model, frozen="drop", reread=in_safetensors(model, tmp_path))
    assert handle.offload(tags=["weights"]) == BASE
    assert handle._group.state.buffers.current is None
    handle.restore()
    assert digests(model) == before


def test_weights_that_changed_on_disk_are_refused_and_nothing_of_them_is_used(
    model: Lora, tmp_path: Path, registered: Any
) -> None:
    before = digests(model)
    path = in_safetensors(model, tmp_path)
    handle = registered(model, frozen="drop", reread=path)
    handle.offload()
    right = path.read_bytes()
    path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(
        StateLost, match=r"'model.base.1.weight' cannot be read again: .*base.safetensors is not"
    ):
        handle.restore()
    assert handle.parked
    assert GATE.closed
    path.write_bytes(right[: len(right) // 2])
    with pytest.raises(OperationFailed, match="ends before byte"):
        handle.restore()
    path.write_bytes(right)
    handle.restore()
    assert digests(model) == before


def test_a_function_that_returns_something_else_is_refused(model: Lora, registered: Any) -> None:
    kept = weights(model)
    handle = registered(model, frozen="drop", reread=lambda: kept)
    handle.offload()
    first = next(iter(kept))
    right = kept[first].clone()
    kept[first][0, 0] += 1.0
    with pytest.raises(StateLost, match="what reread returns is not what it was"):
        handle.restore()
    kept[first].copy_(right)
    handle.restore()


def test_weights_that_the_job_changed_are_state_like_any_other(
    model: Lora, tmp_path: Path, registered: Any
) -> None:
    for policy in ({"frozen": "drop", "reread": in_safetensors(model, tmp_path)}, {"frozen": "share"}):
        handle = registered(model, **policy)
        handle.offload()
        handle.restore()
        with torch.no_grad():
            model.base[0].weight.add_(model.lora_b.weight @ model.lora_a.weight)  # merged
        before = digests(model)
        assert handle.offload() == BASE + ADAPTER
        assert handle._group.state.buffers.current.size == BASE // 2 + ADAPTER
        handle.restore()
        assert digests(model) == before
        handle.close()
        torch.manual_seed(3)
        model.load_state_dict(Lora().state_dict())


@pytest.mark.parametrize("near", [True, False], ids=["in this memory", "on another device"])
@pytest.mark.parametrize("policy", ["share", "drop"])
def test_the_same_holds_wherever_the_weights_are(
    policy: str, near: bool, model: Lora, tmp_path: Path, registered: Any
) -> None:
    before = digests(model)
    handle = registered(model)
    (adapter,) = handle._registration.adapters
    adapter.near = frozenset({"cpu"}) if near else frozenset()
    adapter.freeze(policy, in_safetensors(model, tmp_path) if policy == "drop" else None)
    adapter.base.lend(handle._group.state.buffers)
    for _ in range(2):
        handle.offload()
        assert handle._group.state.buffers.current.size == ADAPTER
        handle.restore()
        assert digests(model) == before
    with torch.no_grad():
        model.base[1].weight[0, 0] += 1.0
    before = digests(model)
    handle.offload()
    handle.restore()
    assert digests(model) == before


def test_files_that_have_none_of_the_weights_are_refused_at_once(tmp_path: Path, model: Lora) -> None:
    from coslice.workload import register

    half = safetensors(tmp_path / "half.safetensors", {"a": torch.zeros(256, 256)})
    text = tmp_path / "readme.safetensors"
    text.write_text("not weights")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"frozen": "drop", "reread": half}, "none of the 2 frozen parameters"),
        ({"frozen": "drop", "reread": text}, "neither a safetensors file nor"),
        ({"frozen": "drop", "reread": tmp_path / "none"}, "there is no file"),
        ({"frozen": "drop"}, "with reread="),
        ({"frozen": "share", "reread": half}, "with reread="),
        ({"frozen": "melt"}, "keep, share, or drop"),
    ]
    for given, words in cases:
        with pytest.raises(ConfigError, match=words):
            register(model, env={}, **given)


def test_only_a_sealed_copy_is_used_and_nobody_can_write_to_it() -> None:
    copy = SharedCopy.make(8192, lambda address: None)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(copy.fd, b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(copy.fd, 0)
    assert is_sealed(copy.fd, 8192)
    copy.close()
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(OperationFailed, match="not sealed"):
        SharedCopy(fd, 8192)


def test_closing_the_handle_lets_the_shared_copy_go(model: Lora) -> None:
    from coslice.workload import register

    def copies() -> set[tuple[int, int]]:
        """The files: the collector may let go of others' meanwhile."""
        found = set[tuple[int, int]]()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if "coslice-base" in os.readlink(f"/proc/self/fd/{name}"):
                    found.add(identity(int(name)))
        return found

    before = copies()
    handle = register(model, env={}, frozen="share")
    handle.offload()
    handle.restore()
    made = copies() - before
    assert made
    handle.close()
    assert not made & copies()
