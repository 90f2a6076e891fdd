"""The state of a model that a recorded pass depends on and does not read again when it is replayed."""

import sys
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
# The attributes that every module has; those of them that matter are compared separately.
_COMMON = frozenset(vars(nn.Module()))


class RecordedState:
    """A snapshot of that state: if two snapshots are equal, a pass recorded at the first one is still right.

    It has the addresses of weights and buffers (their contents are read by each replay), hooks, replaced forwards, the
    attributes of all modules (with which adapters are switched off, for example) and the configuration. What a hook or
    function reads from elsewhere cannot be covered.
    """

    def __init__(self, model: PreTrainedModel, modules: Iterable[nn.Module], recorder: object):
        # References and not ids, since a new object may get the id of one that is gone.
        self._objects: list[object] = [recorder]
        self._numbers: list[object] = [repr(model.config.to_dict())]
        for module in modules:
            self._add(module)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RecordedState)
            and self._numbers == other._numbers
            and len(self._objects) == len(other._objects)
            and all(mine is theirs for mine, theirs in zip(self._objects, other._objects, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    def _add(self, module: nn.Module) -> None:
        owner = sys.modules.get(type(module).__module__)
        self._objects += [type(module).forward, getattr(owner, "apply_rotary_pos_emb", None)]
        self._numbers += [type(module), tuple(module._forward_hooks), tuple(module._forward_pre_hooks)]
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            self._add_value(tensor)
        for name, value in vars(module).items():
            if name not in _COMMON:
                self._numbers.append(name)
                self._add_value(value)

    def _add_value(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self._numbers.append((value.data_ptr(), value.dtype, value.shape, value.stride()))
        elif isinstance(value, _PLAIN):
            self._numbers.append(value)
        elif isinstance(value, _CONTAINERS):
            self._numbers.append(repr(value))
        else:
            self._objects.append(value)
