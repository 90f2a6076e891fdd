"""A stand-in for CUDA graphs on a CPU: what was recorded is done again on the very same tensors."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decoder.backends.cuda.tails import COLUMNS

# What makes the host wait for a device, or sends it numbers from memory that may have changed since.
_FORBIDDEN = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "lift_fresh", "bincount")


class ReadError(RuntimeError):
    """The host read from the device where it must not."""


class _Recording(TorchDispatchMode):
    """As a CUDA graph, it knows tensors by their memory, and numbers as they were."""

    def __init__(self, keep: bool):
        super().__init__()
        self.calls: list[tuple] | None = [] if keep else None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in _FORBIDDEN:
            raise ReadError(f"{function} in a pass that is to be recorded")
        output = function(*args, **(kwargs or {}))
        if self.calls is not None:
            in_place = function._schema.is_mutable
            memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
            # A view of what was given needs no doing again; whether an operation gives one, only its output tells.
            if in_place or not all(tensor.untyped_storage().data_ptr() in memory for tensor in _tensors(output)):
                self.calls.append((function, args, kwargs or {}, None if in_place else output))
        return output

    def replay(self) -> None:
        for function, args, kwargs, output in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(_tensors(output), _tensors(again if output is not None else None), strict=True):
                old.copy_(new)


class TapeRecorder:
    """A `graphs.Recorder` of what a CPU does; counts its passes.

    A replay spoils the outputs of all other recordings, as graphs that share their memory may.
    """

    def __init__(self):
        self.fault = None
        self.rehearsed = self.recorded = self.replayed = 0
        self._written: list[weakref.ref] = []

    def warm_up(self, run):
        self.rehearsed += 1
        try:
            with _Recording(keep=False):
                return True, run()
        except ReadError:
            return False, run()

    def record(self, run):
        self.recorded += 1
        tape = _Recording(keep=True)
        with tape:
            outputs = run()
        # Nothing is done while CUDA records, so nothing but a replay may give the outputs.
        self._written += map(weakref.ref, _tensors(outputs))
        self._spoil()

        def replay():
            self.replayed += 1
            self._spoil()
            tape.replay()

        return replay, outputs

    def _spoil(self):
        for written in self._written:
            if (tensor := written()) is not None:
                tensor.fill_(float("nan"))


def _tensors(nested):
    if isinstance(nested, torch.Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = list(nested.values())
    return [tensor for part in nested for tensor in _tensors(part)] if isinstance(nested, tuple | list) else []


def eager_rotation(q, k, cos, sin):
    """What the rotary kernel computes, the obvious way."""
    rotated = []
    for x in (q, k):
        (first, second), (cos1, cos2), (sin1, sin2) = (part.double().chunk(2, -1) for part in (x, cos, sin))
        halves = first * cos1[:, None] - second * sin1[:, None], second * cos2[:, None] + first * sin2[:, None]
        rotated.append(torch.cat(halves, -1).to(x.dtype))
    return tuple(rotated)


def eager_attention(query, key, value, kv_length, mask, scaling):
    """What the split-KV kernel computes, the obvious way, over whole buffers; garbage in them must not matter."""
    heads, new = query.shape[1:3]
    groups, slots = key.shape[1:3]
    among_new = torch.arange(slots, device=key.device) - kv_length
    known = among_new < new
    if mask is None:
        mask = torch.ones(new, new, dtype=torch.bool, device=key.device).tril()
    seen = (among_new < 0) | (known & mask[:, among_new.clamp(0, new - 1)])
    key, value = (
        buffer.masked_fill(~known[:, None], 0).repeat_interleave(heads // groups, 1) for buffer in (key, value)
    )
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


def eager_attention_by_position(query, key, value, tails, scaling, places=512):
    """What the kernels of attention by position compute, a token at a time, over as many keys whatever it sees."""
    heads, new = query.shape[1:3]
    place = torch.arange(places, device=key.device)
    in_tail = place - tails[:, :1]
    slots = torch.where(in_tail < 0, place, tails[:, 1:].gather(1, in_tail.clamp(0, COLUMNS - 1)))
    slots = torch.where(in_tail < COLUMNS, slots, -1)
    rows = query[0].reshape(key.shape[1], -1, new, query.shape[3]).unbind(2)
    outputs = []
    for row, index in zip(rows, slots.unbind(), strict=True):
        own_key, own_value = (
            pairs[0].index_select(1, index.clamp_min(0)).masked_fill((index < 0)[:, None], 0).double()
            for pairs in (key, value)
        )
        scores = (row.double() @ own_key.mT * scaling).masked_fill(index < 0, -torch.inf)
        outputs.append((scores.softmax(-1) @ own_value).reshape(heads, -1).to(query.dtype))
    return torch.stack(outputs, 1)[None]
