"""Keeps hands off tensors whose memory is away: using one raises ``StateOffloaded`` instead of killing the
process.

While parked, the class of each tensor is a subclass whose ``__torch_function__`` lets through what reads no
memory (shape, dtype, flags) and raises for everything else. Values are never touched, only ``__class__``.

What this cannot guard, because torch does not ask: other tensors over the same memory that were made by the
user (views, ``detach()``), numpy arrays and raw pointers, code that turned ``__torch_function__`` off, and
C++ that holds the tensor (a backward pass, TorchScript). Touching state through those outside an accelerator
section ends the process or reads nonsense, as touching a freed device pointer does.
"""

from functools import cache
from typing import Any

from coslice.errors import StateOffloaded
from coslice.workload.adapters.torch_find import torch

# fmt: off
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "itemsize",
    "nbytes", "names", "name", "_version", "output_nr", "retains_grad", "is_cpu", "is_cuda", "is_meta",
    "is_sparse", "is_mps", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_xpu",
    "_backward_hooks", "_grad", "_grad_fn", "_post_accumulate_grad_hooks",
)
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device",
    "has_names", "is_shared", "is_pinned", "is_same_size", "_is_view", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "__len__", "__hash__", "dim_order", "untyped_storage",
)
_FUNCTIONS = (
    "is_floating_point", "is_complex", "is_signed", "is_inference", "numel", "is_same_size",
)
# fmt: on
_names: dict[int, str] = {}
"""id of a parked tensor → its name, for the message: of one that is gone it may be another tensor's id."""
_kinds: set[type] = set()
"""The classes of tensors that are guarded."""


@cache
def _harmless() -> frozenset[Any]:
    tensor = torch().Tensor
    allowed = [getattr(tensor, name).__get__ for name in _PROPERTIES if hasattr(tensor, name)]
    allowed += [getattr(tensor, name) for name in _METHODS if hasattr(tensor, name)]
    allowed += [getattr(torch(), name) for name in _FUNCTIONS if hasattr(torch(), name)]
    allowed.append(tensor.requires_grad.__set__)
    return frozenset(allowed)


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    clears_gradient = func == torch().Tensor.grad.__set__ and args[1] is None
    if func in _harmless() or clears_gradient:
        with torch()._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    if func in (torch().Tensor.__repr__, torch().Tensor.__format__):
        return _describe(args[0])
    what = _name_in(args) or _name_in((kwargs or {}).values()) or "a registered tensor"
    raise StateOffloaded(
        f"{what} is in host memory and was used outside an accelerator section "
        f"(by {getattr(func, '__name__', func)}): call acquire() first, or use it inside on_accelerators()"
    )


def _describe(tensor: Any) -> str:
    with torch()._C.DisableTorchFunctionSubclass():
        name, shape = _names.get(id(tensor), "tensor"), tuple(tensor.shape)
        return f"<{name} in host memory, shape={shape}, dtype={tensor.dtype}>"


def _name_in(values: Any) -> str:
    for value in values:
        if name := _names.get(id(value)):
            return name
        if isinstance(value, list | tuple) and (name := _name_in(value)):
            return name
    return ""


@cache
def _guarded(kind: type) -> type:
    body = {
        "__slots__": (),
        "__torch_function__": classmethod(_torch_function),
        "__module__": kind.__module__,
    }
    guarded = type(f"Offloaded{kind.__name__}", (kind,), body)
    _kinds.add(guarded)
    return guarded


class Guard:
    """Guards over a set of tensors, and over modules and optimizers for a message with their names."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Any, type]] = []
        self._hooks: list[Any] = []

    def tensor(self, tensor: Any, name: str) -> None:
        """Guard one tensor; once is enough. Kinds whose class cannot be exchanged stay as they are."""
        kind = type(tensor)
        if kind in _kinds:
            return
        try:
            tensor.__class__ = _guarded(kind)  # type: ignore[arg-type]  # classes are hashable
        except TypeError:
            return
        _names[id(tensor)] = name
        self._tensors.append((tensor, kind))

    def module(self, module: Any, name: str) -> None:
        def refuse(*_: Any) -> None:
            raise StateOffloaded(
                f"module {name!r} was called while its state is in host memory: "
                "call acquire() first, or call it inside on_accelerators()"
            )

        self._hooks.append(module.register_forward_pre_hook(refuse))

    def optimizer(self, optimizer: Any, name: str) -> None:
        def refuse(*_: Any) -> None:
            raise StateOffloaded(
                f"a step of {name!r} while its state is in host memory: "
                "call acquire() first, or step inside on_accelerators()"
            )

        if hasattr(optimizer, "register_step_pre_hook"):
            self._hooks.append(optimizer.register_step_pre_hook(refuse))

    def lift(self) -> None:
        for tensor, kind in self._tensors:
            tensor.__class__ = kind
            _names.pop(id(tensor), None)
        for hook in self._hooks:
            hook.remove()
        self._tensors, self._hooks = [], []
