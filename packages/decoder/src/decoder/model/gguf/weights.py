"""The weights of a file, unpacked into a model's parameters of the wanted dtype, one tensor at a time."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from decoder.model.gguf.architectures import architecture_of
from decoder.model.gguf.file import ELSE, FETCH, GgufFile, named
from decoder.model.gguf.formats import unpacked
from decoder.model.gguf.rotary import OF_ROTARY
from decoder.model.gguf.sources import LAYER, Source

_OF_ROTARY = (*OF_ROTARY, "attn_rot_embd.weight")


def sources(file: GgufFile, config: PreTrainedConfig) -> dict[str, Source]:
    """By the names of a model's parameters, what they are made of. Raises ValueError for a tensor of unknown use."""
    architecture = architecture_of(file)
    found: dict[str, Source] = {}
    for name in file.tensors:
        layer = LAYER.fullmatch(name)
        number, own = (None, name) if layer is None else layer.groups()
        if own in _OF_ROTARY or (number is not None and int(number) >= config.num_hidden_layers):
            continue
        if number is not None and architecture.unused(config, int(number), own):
            continue
        if number is None and own in architecture.lists:
            for part in range(next(iter(file.tensors[name].shape), 0)):
                found[f"{architecture.lists[own]}.{part}.weight"] = Source((name,), part=part)
            continue
        ours = architecture.parameter(number, own)
        if ours is None:
            raise ValueError(f"{file.path} has a tensor {named(name)}, unknown in {file.architecture} models: {ELSE}")
        found[ours] = join_sources(found.get(ours), name, architecture.change(config, own))
    return found


def join_sources(source: Source | None, name: str, change: dict) -> Source:
    """A parameter's ``source`` with one more tensor, called ``name``; ``change`` is what differs from a plain one."""
    # Gates come before what they gate.
    names = (name,) if source is None else (*source.tensors, name)
    names = tuple(sorted(names, key=lambda each: ("ffn_gate" not in each and "attn_qkv" not in each, each)))
    return Source(names, **change)


def state_dict(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters of the model, each of ``dtype``.

    Raises ValueError, with the tensor, for what cannot be unpacked, is unknown or is no number.
    """
    return {name: parameter(file, source, dtype) for name, source in sources(file, config).items()}


def check_shapes(file: GgufFile, model: PreTrainedModel) -> None:
    """Refuse a file whose tensors are not those of its configuration, before any is unpacked.

    Args:
        model: the model of the configuration, which may be on the meta device.

    Raises:
        ValueError: it has too few, others, or of other sizes; each is named.
    """
    made = sources(file, model.config)
    known = {name for own in (model.named_parameters(remove_duplicate=False), model.named_buffers()) for name, _ in own}
    for name, source in made.items():
        if name not in known:
            unused = f"which models of type {model.config.model_type} do not use here"
            raise ValueError(f"{file.path} has a tensor {named(source.tensors[0])}, {unused}: {ELSE}")
    tied = set(model.all_tied_weights_keys)
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name not in made:
            if name in tied:
                continue
            raise ValueError(f"{file.path} lacks a tensor that its configuration asks for: {name}")
        source = made[name]
        shapes = [file.tensors[each].shape for each in source.tensors]
        try:
            joined = source.shape(shapes)
        except (IndexError, RuntimeError, ValueError) as error:
            names = " and ".join(map(named, source.tensors))
            raise ValueError(f"{file.path} has sizes of {names} that do not go together: {FETCH}, or {ELSE}") from error
        expected = tuple(weight.shape)
        if joined != expected:
            sizes, others = ("x".join(map(str, shape)) for shape in (joined, expected))
            raise ValueError(
                f"{file.path} has a tensor {source.tensors[0]} of {sizes} numbers, and its configuration says {others}"
            )


def parameter(file: GgufFile, source: Source, dtype: torch.dtype) -> torch.Tensor:
    """One parameter or buffer of a model."""
    dtype = torch.float32 if source.wide else dtype
    parts = []
    for name in source.tensors:
        tensor = file.tensors[name]
        # A bias has as many rows as numbers.
        blocks = tensor.blocks if len(tensor.shape) > 1 else tensor.blocks.reshape(-1, tensor.format.bytes)
        # Numbers that are made of those in the file are rounded once.
        exact = dtype if source.number is None else torch.float32
        try:
            parts.append(unpacked(blocks, tensor.format, exact).view(tensor.shape))
        except FloatingPointError as error:
            raise ValueError(f"{file.path} holds values in {name} that are no numbers: {FETCH}, or {ELSE}") from error
        file.release(name)
    if source.part is not None:
        return parts[0][source.part].clone()
    axis = source.row_axis(parts[0].shape)
    if source.join is not None:
        return source.join(parts).contiguous()
    made = parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
    for at, order in ((axis, source.rows), (-1, source.columns)):
        if order is not None:
            made = made.index_select(at, torch.from_numpy(order(made.shape[at])))
    if source.number is not None:
        made = source.number(made).to(dtype)
    if source.transposed:
        made = made.transpose(-1, -2).contiguous()
    if source.flat:
        return made.flatten()
    return made.unsqueeze(source.axis) if made.ndim < source.axes else made
