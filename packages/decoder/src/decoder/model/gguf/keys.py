"""Keys of a file behind its architecture's name, checked as they are read."""

from typing import Any

import numpy as np

from decoder.model.gguf.file import ELSE, GgufFile

# What changes nothing of keys that an architecture's reader does not look at; any value of those without one.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}
_IDLE = (
    # Norms of the other kind; scalings that are none; what tensors tell; positions of images.
    *("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "rope.scaling.attn_factor"),
    *("rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count", "vocab_size"),
    *("full_attention_interval", "rope.dimension_sections", "tensor_data_layout", "n_deepstack_layers"),
)
# Keys that say again what another one says, or says for all layers.
_AGAIN = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length": "attention.key_length",
    "attention.value_length_swa": "attention.key_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}


def value_of(file: GgufFile, key: str, kind: Any, default: Any = None) -> Any:
    """The value of a key, as `GgufFile.get`. Raises ValueError for a number that is negative or infinite, too."""
    full = f"{file.architecture}.{key}"
    value = file.get(full, kind, default)
    if not isinstance(value, float):
        return value
    if not 0 <= value < np.finfo(np.float32).max:
        raise ValueError(f"{file.path} says that its {full} is {value}: {ELSE}")
    # The file stores float32: 1e-05 is read as 9.999999747378752e-06.
    return float(str(np.float32(value)))


def needed_value(file: GgufFile, key: str, kind: Any) -> Any:
    """`value_of` what a model of this architecture has. Raises ValueError, with the key, if the file does not say."""
    value = value_of(file, key, kind)
    if value is None:
        raise ValueError(f"{file.path} has no {file.architecture}.{key}: {ELSE}")
    return value


def size_of(file: GgufFile, key: str, some_layers: bool = False) -> int | None:
    """A size, at least 1; None if the file does not say.

    Args:
        some_layers: whether layers may have no such part, by 0 in a list of sizes by layer.

    Raises:
        ValueError: it is none, or layers have different ones.
    """
    full = f"{file.architecture}.{key}"
    size = file.metadata.get(full)
    file.looked_at.add(full)
    if isinstance(size, np.ndarray):
        of_layers = set(size.tolist()) - ({0} if some_layers else set())
        if len(of_layers) != 1:
            raise ValueError(f"{file.path} has a {full} of its own for each layer, which is not read: {ELSE}")
        size = of_layers.pop()
    else:
        size = file.get(full, int)
    if size is not None:
        _check_size(file, key, size)
    return size


def sizes_of(file: GgufFile, key: str, layers: int) -> list[int]:
    """A size that layers may have of their own, for each of them.

    Raises ValueError, with the key, if the file does not say, or of another number of layers.
    """
    full = f"{file.architecture}.{key}"
    sizes = file.metadata.get(full)
    file.looked_at.add(full)
    if not isinstance(sizes, np.ndarray):
        return [needed_size(file, key)] * layers
    if sizes.dtype.kind not in "iu" or len(sizes) != layers:
        raise ValueError(f"{file.path} has a {full} of {len(sizes)} layers, and its model {layers}: {ELSE}")
    for size in sizes.tolist():
        _check_size(file, key, size)
    return sizes.tolist()


def window_layers(file: GgufFile, period: int) -> list[str]:
    """The kinds of layers: all have windows but the last of each ``period``, unless the file says which."""
    layers = needed_size(file, "block_count")
    key = "attention.sliding_window_pattern"
    pattern = file.metadata.get(f"{file.architecture}.{key}")
    file.looked_at.add(f"{file.architecture}.{key}")
    if not isinstance(pattern, np.ndarray):
        period = size_of(file, key) or period
        pattern = (np.arange(layers) + 1) % period != 0
    if len(pattern) != layers:
        raise ValueError(f"{file.path} has windows in {len(pattern)} layers, and its model {layers} ({key}): {ELSE}")
    return ["sliding_attention" if window else "full_attention" for window in pattern]


def _check_size(file: GgufFile, key: str, size: int) -> None:
    # Far beyond any model, and small enough for products of four to be numbers of 64 bits.
    most = {"context_length": 2**31, "expert_count": 2**12, "expert_used_count": 2**12}.get(key, 2**18)
    if not 1 <= size <= most:
        raise ValueError(f"{file.path} says that its {file.architecture}.{key} is {size}: {ELSE}")


def needed_size(file: GgufFile, key: str) -> int:
    """`size_of` what a model of this architecture has. Raises ValueError, with the key, if the file does not say."""
    size = size_of(file, key)
    if size is None:
        raise ValueError(f"{file.path} has no {file.architecture}.{key}: {ELSE}")
    return size


def refuse_unread(file: GgufFile, normalised: bool) -> None:
    """Raise ValueError for a key of the architecture that nobody has looked at and that may change texts.

    Args:
        normalised: whether weights of experts are made to sum to one.
    """
    start = f"{file.architecture}."
    for key, value in file.metadata.items():
        name = key.removeprefix(start)
        if not key.startswith(start) or key in file.looked_at or name in _IDLE:
            continue
        nothing = _NOTHING.get(name, ())
        if name in _AGAIN:
            nothing = (file.metadata.get(start + _AGAIN[name], value),)
        elif name == "expert_weights_norm":
            nothing = (normalised,)
        if isinstance(value, np.ndarray) or value not in nothing:
            raise ValueError(f"{file.path} has a key that is not read ({key} {value}): {ELSE}")
