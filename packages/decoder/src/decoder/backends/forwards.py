"""Other forwards in the place of modules' own ones, until the end of a block."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def under_autocast() -> bool:
    """Whether autocast is on, for any device."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def is_changed(module: nn.Module) -> bool:
    """Whether the user has put a hook on a module, or a forward of their own in the place of its class's."""
    return bool("forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks)


def structure_of(modules: Iterable[nn.Module]) -> Hashable:
    """What a pass through ``modules`` is made of, but for the numbers in weights: classes, forwards, hooks, shapes.

    The number of threads counts, too.
    """

    def of(module: nn.Module) -> tuple:
        hooks = tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
        forward = id(module.__dict__.get("forward", type(module).forward))
        weight = module._parameters.get("weight")
        return id(module), type(module), forward, hooks, None if weight is None else (weight.dtype, weight.shape)

    return torch.get_num_threads(), _has_any_global_hook(), tuple(map(of, modules))


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Give each module its other forward until the end of the block; blocks can be nested.

    A module whose forward an outer block or the user has already replaced is left as it is, unless the other forward
    names that one as the one it stands for (``over``). So are all modules under autocast, which chooses other dtypes.
    """
    if under_autocast():
        forwards = {}
    overs = {module: getattr(other, "over", None) for module, other in forwards.items()}
    mine = [module for module in forwards if module.__dict__.get("forward") is overs[module]]
    for module in mine:
        module.__dict__["forward"] = forwards[module]
    try:
        yield
    finally:
        for module in mine:
            del module.__dict__["forward"]
            if overs[module] is not None:
                module.__dict__["forward"] = overs[module]
