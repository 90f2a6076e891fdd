"""A check that fails when an operation makes the host wait for a device; it covers the calling thread only."""

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations of which the host needs the result, or its shape.
_READING = frozenset(
    (
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "histc",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    )
)
_INDEXING = frozenset(("_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index", "index_put", "index_put_"))


class HostReadError(RuntimeError):
    """An operation would have made the host wait for the device."""


class HostReadsRefused(TorchDispatchMode):
    """A block in which every operation that makes the host wait for a device raises `HostReadError`.

    A pass with such an operation cannot be recorded. PyTorch's own check (`torch.cuda.set_sync_debug_mode`) finds a
    little more, but it is one switch for the whole process, so harmless reads in other threads would fail meanwhile.
    An operation that this check misses makes the recording fail, and then passes run unrecorded.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _of_one_kernel(function, args, kwargs):
            # Under inference mode composite operations arrive whole; one of those that they are made of may wait.
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _waits(function, args, kwargs):
            raise HostReadError(f"{function} makes the host wait for the device")
        return function(*args, **kwargs)


def _of_one_kernel(function, args: tuple, kwargs: dict) -> bool:
    """Whether an operation has a kernel of its own for the device of its tensors.

    Some have one beside a composite form, such as root-mean-square norms on CUDA. The composite rounds in other places,
    so a pass that is run under the check would have other bits than the same pass recorded.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    key = DispatchKey.CUDA if any(tensor.is_cuda for tensor in tensors) else DispatchKey.CPU
    return function.has_kernel_for_dispatch_key(key)


def _waits(function, args: tuple, kwargs: dict) -> bool:
    name = function.overloadpacket.__name__
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if all(tensor.device.type == "cpu" for tensor in tensors) and kwargs.get("device") is None:
        return False
    if name in _READING:
        return True
    if name in _INDEXING:
        # A mask selects the positions where it is true, and only the device knows how many these are.
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and isinstance(args[-1], Tensor)
    if name == "copy_":
        return _crosses(args[1].device, args[0].device) and not _non_blocking(args[2:], kwargs)
    if name == "_to_copy" and kwargs.get("device") is not None:
        return _crosses(args[0].device, torch.device(kwargs["device"])) and not _non_blocking((), kwargs)
    return False


def _crosses(source: torch.device, destination: torch.device) -> bool:
    return (source.type == "cpu") != (destination.type == "cpu")


def _non_blocking(args: tuple, kwargs: dict) -> bool:
    return bool(args[0]) if args else bool(kwargs.get("non_blocking", False))
