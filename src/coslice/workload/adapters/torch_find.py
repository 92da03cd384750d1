"""Which storages a process's modules, optimizers and tensors consist of, found anew for every move.

Called by the torch adapter. Looks at tensors, never at their values. A *storage* is one piece of memory; tied
weights and views are several tensors over one storage, which is listed once, under the first name it was met.

Not found: tensors that hang as plain attributes on a module (register them as buffers, or pass them in
``tensors=``) and whatever only the user's own code knows of.
"""

import fnmatch
import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from coslice.errors import ConfigError

WEIGHTS, OPTIMIZER, ADAPTER, GRADIENTS = "weights", "optimizer", "adapter", "gradients"
LORA = "lora_"
"""Parameters with this in their name are the small trained part of a frozen model (peft's naming)."""


in_common: MutableMapping[int, Any] = weakref.WeakValueDictionary()
"""Storages (by ``_cdata``) in a copy that several processes use (``torch_common``): not torch's to resize.
Each with who keeps it: when he is gone, another storage may have the number."""


def torch() -> Any:
    """The torch that is already loaded. coslice itself never imports it."""
    return sys.modules["torch"]


@dataclass(slots=True)
class Block:
    """One storage and the tensors over it, each with the name it was met by."""

    storage: Any
    nbytes: int
    name: str
    tag: str
    device: str
    tensors: list[tuple[Any, str]] = field(default_factory=list)
    frozen: bool = False
    """All tensors over it are parameters that are not trained."""


@dataclass(frozen=True, kw_only=True)
class Roots:
    """What was registered, by name, and the tags that users chose."""

    modules: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    own_tags: frozenset[str] = frozenset()
    """Names given by the user as {tag: object}: all of that object has this tag."""
    patterns: Mapping[str, str] = field(default_factory=dict)
    """fnmatch pattern of a tensor's name → tag; the first match decides."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.modules, *self.optimizers, *self.tensors)


def named_tensors(roots: Roots) -> Iterator[tuple[str, str, Any]]:
    """(name, tag, tensor) in a fixed order; a tensor may come several times."""
    for root, module in roots.modules.items():
        own = root if root in roots.own_tags else ""
        for kind in (module.named_parameters, module.named_buffers):
            for path, tensor in kind(prefix=root):
                yield path, own or (ADAPTER if LORA in path else WEIGHTS), tensor
                yield from _gradient(path, own, tensor)
    for root, optimizer in roots.optimizers.items():
        own = root if root in roots.own_tags else ""
        for path, tensor in _params(root, optimizer):
            yield path, own or WEIGHTS, tensor
            yield from _gradient(path, own, tensor)
        for path, tensor in walk(root, _parts(optimizer)):
            yield path, own or OPTIMIZER, tensor
    for root, value in roots.tensors.items():
        own = root if root in roots.own_tags else WEIGHTS
        for path, tensor in walk(root, value):
            yield path, own, tensor
            yield from _gradient(path, own, tensor)


def _gradient(path: str, own: str, tensor: Any) -> Iterator[tuple[str, str, Any]]:
    if tensor.is_leaf and tensor.grad is not None:
        yield f"{path}.grad", own or GRADIENTS, tensor.grad


def _params(root: str, optimizer: Any) -> Iterator[tuple[str, Any]]:
    for i, group in enumerate(list(getattr(optimizer, "param_groups", ()))):
        for j, tensor in enumerate(list(group.get("params", ()))):
            yield f"{root}.group{i}.{j}", tensor


def _parts(optimizer: Any) -> dict[str, Any]:
    """An optimizer's own attributes. Wrappers (accelerate, master copies of weights) keep theirs in the same
    way."""
    parts: dict[str, Any] = {"state": getattr(optimizer, "state", {})}
    return parts | dict(vars(optimizer))


def walk(path: str, value: Any, _seen: dict[int, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """All tensors in nested containers (mappings, sequences, sets, optimizers), each container once."""
    if isinstance(value, torch().Tensor):
        yield path, value
        return
    seen = dict[int, Any]() if _seen is None else _seen
    optimizer = isinstance(value, torch().optim.Optimizer)
    if id(value) in seen or not (optimizer or isinstance(value, Mapping | list | tuple | set | frozenset)):
        return
    seen[id(value)] = value  # kept: of a temporary that is gone the id could be another's
    if optimizer:
        value = _parts(value)
    if isinstance(value, Mapping):
        # list(): the training thread may add a key meanwhile. A state's key may be the parameter itself.
        for number, (key, inner) in enumerate(list(value.items())):
            name = key if isinstance(key, str | int) else number
            yield from walk(f"{path}.{name}", inner, seen)
    else:
        for number, inner in enumerate(list(value)):
            yield from walk(f"{path}.{number}", inner, seen)


def plain_tensors(path: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """The tensors with a storage of their own behind ``tensor``: itself, or the parts of a wrapper or sparse
    one."""
    if hasattr(type(tensor), "__tensor_flatten__"):  # DTensor, quantised weights, ...
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(f"{path}.{name}", getattr(tensor, name))
    elif tensor.layout == torch().sparse_coo:
        yield f"{path}.indices", tensor._indices()
        yield f"{path}.values", tensor._values()
    elif tensor.layout in (torch().sparse_csr, torch().sparse_bsr):
        yield f"{path}.crow_indices", tensor.crow_indices()
        yield f"{path}.col_indices", tensor.col_indices()
        yield f"{path}.values", tensor.values()
    elif tensor.layout == torch().strided:
        yield path, tensor
    else:
        raise ConfigError(
            f"tensor {path!r} has layout {tensor.layout}, which coslice cannot move: use a strided one"
        )


def find(roots: Roots, seen: set[int], *, device: str) -> list[Block]:
    """Every storage once, but for those in ``seen``, to which the found ones are added.

    ``device``: ``cuda`` leaves host tensors where they are (they are not on the accelerator); ``host`` takes
    all.
    """
    loaded = torch()
    ordinary = (loaded.nn.Parameter, loaded.Tensor)
    blocks: dict[int, Block] = {}
    met: dict[int, Any] = {}
    """By id, and kept: a container may make its tensors anew each time it is looked at."""
    with loaded._C.DisableTorchFunctionSubclass():  # parked tensors are looked at too
        for name, tag, tensor in named_tensors(roots):
            if id(tensor) in met:
                continue
            met[id(tensor)] = tensor
            plain = type(tensor) in ordinary and tensor.layout is loaded.strided
            for part_name, part in ((name, tensor),) if plain else plain_tensors(name, tensor):
                where = part.device.type
                if where == "meta" or (device == "cuda" and where == "cpu"):
                    continue
                storage = part.untyped_storage()
                key = storage._cdata
                still = not tensor.requires_grad and isinstance(tensor, loaded.nn.Parameter)
                if key in blocks:
                    blocks[key].tensors.append((tensor, name))
                    blocks[key].frozen &= still
                elif key not in seen and (size := storage.nbytes()) > 0:
                    blocks[key] = Block(storage, size, part_name, tag, where, [(tensor, name)], still)
    seen.update(blocks)
    if roots.patterns:
        for block in blocks.values():
            block.tag = _tag(block, roots.patterns)
    return list(blocks.values())


def _tag(block: Block, patterns: Mapping[str, str]) -> str:
    return next((tag for pattern, tag in patterns.items() if fnmatch.fnmatch(block.name, pattern)), block.tag)


def check_movable(blocks: list[Block]) -> None:
    """Raise ``ConfigError`` naming the first storage that cannot be given up."""
    for block in blocks:
        if block.storage._cdata in in_common:
            continue
        if block.device == "cpu" and (not block.storage.resizable() or block.storage.is_shared()):
            shared = block.storage.is_shared()
            if block.tag == OPTIMIZER and not shared:
                _own(block)
                continue
            why = "shared with other processes" if shared else "also used by numpy or other code"
            raise ConfigError(
                f"tensor {block.name!r} cannot be moved: its memory is {why}; register a copy that torch "
                "owns (tensor.clone()), and take numpy arrays of copies only (tensor.clone().numpy())",
                data={"tensor": block.name},
            )


def _own(block: Block) -> None:
    """Give an optimizer's state memory that torch can resize; the tensors stay the same objects.

    ``Optimizer.load_state_dict`` keeps the tensors of ``torch.load``, whose memory is the loaded file's:
    every job that resumes from a checkpoint has them.
    """
    copy = block.storage.clone()
    for tensor, _ in block.tensors:
        tensor.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
    block.storage = copy
