"""The functions that replace a model's own ones while a pass runs, where they pass their tests on the device.

On CUDA, layers with the same input (queries, keys and values; gate and up) are not joined to one product. That would
need their weights in one buffer, with the parameters as views of it. A state dict would then save the whole buffer with
each of them; `Module.to`, quantisers and adapters would separate them again; and a reference to one parameter would
hold the memory of all. A copy would double the memory of the layers. Little is lost, since recorded passes do not
launch their kernels one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from decoder.backends.attention import AttentionShape
from decoder.backends.cuda.rotary import FusedRotary, fused_rotary
from decoder.backends.fast_paths import FUSED, MODEL, NATIVE, NORMS, PACKED, ROTARY, FastPaths, in_words
from decoder.backends.kernel_check import (
    native_attention_fault,
    packed_fault,
    packed_kinds,
    packed_shapes,
    rms_norm_fault,
    rotary_fault,
)
from decoder.backends.native import native_attention
from decoder.backends.native.activations import activations
from decoder.backends.native.fused_layer import FusedLayer, fused_layer_fault, fused_layers
from decoder.backends.native.fused_model import FusedModel, fused_model, fused_model_fault
from decoder.backends.native.norms import fused_norms, looks_like_rms_norm
from decoder.backends.native.packed_linear import packing
from decoder.model.short_weights import dtype_name
from decoder.parallel.products import SharedLayers
from decoder.work import Work

if TYPE_CHECKING:
    from decoder.backends.model_pass import ModelPass


Forwards = dict[nn.Module, Callable]


class FastLayers(NamedTuple):
    """The replacements for one model.

    Attributes:
        layers: by module, its other forward: layers of the model and of helpers such as draft heads.
        called: those of them that drafters call outside of a pass: the final norm, the head, and the helpers' layers.
        rotary: by modelling file, its other rotary embedding.
        model: the pass through all of its layers, if these are fused.
    """

    layers: dict[nn.Module, Callable]
    called: dict[nn.Module, Callable]
    rotary: dict[ModuleType, FusedRotary]
    model: FusedModel | None = None


def tested_layers(modules: Sequence[nn.Module], shared: SharedLayers, paths: FastPaths) -> Work[Forwards]:
    """By module, its other forward: decoder layers where they can be fused, elsewhere norms, products and activations.

    Layers that processes share have forwards of transformers' in them, and are not fused.
    """
    parts = [*modules, *shared.modules]
    found = tested_norms(parts, paths) | (yield from tested_products(parts, paths))
    if paths.device.type == "cpu":
        found |= activations(parts)
    found |= shared.forwards(found)
    fused = tested_fused(modules, paths, found)
    within = {inner for layer in fused for inner in layer.modules()}
    return {module: forward for module, forward in found.items() if module not in within} | fused


def tested_norms(modules: Sequence[nn.Module], paths: FastPaths) -> dict[nn.Module, Callable]:
    """`fused_norms` of ``modules``, or nothing if PyTorch's kernel fails its test."""
    weights = [module.get_parameter("weight") for module in modules if looks_like_rms_norm(module)]
    sizes = frozenset((len(weight), weight.dtype) for weight in weights)
    if not sizes:
        paths.leave_off(NORMS, "no root-mean-square norm but of float64, which stays as it is")
        return {}
    if not paths.passes_test(NORMS, sizes, lambda: rms_norm_fault(sizes, paths.device), "root-mean-square norms"):
        return {}
    found = fused_norms(modules)
    if not found:
        paths.leave_off(NORMS, "the model's norms are another function")
    return found


def tested_products(modules: Sequence[nn.Module], paths: FastPaths) -> Work[Forwards]:
    """`packing` of ``modules``, or nothing if the packed products fail their test."""
    if paths.device.type != "cpu":
        paths.leave_off(PACKED, "for a CPU only")
        return {}
    try:
        found = yield from packing(modules)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = in_words(error)
        paths.passes_test(PACKED, reason, lambda: reason, "")
        return {}
    if not found:
        paths.leave_off(PACKED, "no layer of a dtype that can be packed here, or no memory for a copy")
        return {}
    key = packed_kinds(found)
    libraries = sorted({kind.__name__.removesuffix("Weight") for _, kind in key})
    covers = f"{len(found)} layers, by {', '.join(libraries)}"
    return found if paths.passes_test(PACKED, key, lambda: packed_fault(found), covers) else {}


def tested_fused(
    modules: Sequence[nn.Module], paths: FastPaths, parts: Mapping[nn.Module, Callable]
) -> dict[nn.Module, FusedLayer]:
    """`fused_layers` of ``modules``, or nothing if one kind fails its test; called after that of their ``parts``."""
    for needed in (PACKED, NORMS):
        if not paths[needed].on:
            paths.leave_off(FUSED, f"needs {needed}")
            return {}
    # Products that were packed once may be of weights that the model no longer has.
    found = {
        layer: fused
        for layer, fused in fused_layers(modules).items()
        if all(part in parts for part in layer.modules() if isinstance(part, nn.Linear))
    }
    kinds = {(type(one), *packed_shapes(list(one.modules())), fused.kind): one for one, fused in found.items()}
    for kind, layer in kinds.items():
        test = partial(fused_layer_fault, layer, found[layer])
        if not paths.passes_test(FUSED, kind, test, f"{len(found)} layers"):
            return {}
    if not found:
        paths.leave_off(FUSED, "the model's layers are of another kind, or of sizes whose products cannot be joined")
    return found


def tested_attention(shape: AttentionShape, paths: FastPaths) -> bool:
    """Whether the native library attends with heads of this shape, where it passes its test."""
    unavailable = native_attention.unavailable(shape, paths.device)
    if unavailable is not None:
        paths.leave_off(NATIVE, unavailable)
        return False
    return paths.passes_test(NATIVE, shape, lambda: native_attention_fault(shape), "in every layer")


def tested_model(
    model_pass: "ModelPass", faster: FastLayers, paths: FastPaths, attends_natively: bool
) -> FusedModel | None:
    """The `fused_model` over these layers, or nothing if it fails its test; called after `tested_fused`."""
    found = fused_model(model_pass.model, faster.layers)
    if found is None:
        paths.leave_off(MODEL, "not all of its layers are fused, or the model around them is another one")
        return None
    config = model_pass.model.config.to_json_string()
    key = type(model_pass.model), config, dtype_name(model_pass.model), attends_natively
    test = partial(fused_model_fault, found, model_pass, faster, attends_natively)
    return found if paths.passes_test(MODEL, key, test, "passes from embedding to head") else None


def tested_rotary(
    modules: Sequence[nn.Module], shape: AttentionShape, paths: FastPaths
) -> dict[ModuleType, FusedRotary]:
    """`fused_rotary` of ``modules``, or nothing if the kernel fails its test."""
    if shape.dtype == torch.float64:
        paths.leave_off(ROTARY, "float64 stays with the model's own")
        return {}
    if not paths.passes_test(ROTARY, shape, lambda: rotary_fault(shape, paths.device), "in every layer"):
        return {}
    found = fused_rotary(modules, paths.device)
    if not found:
        paths.leave_off(ROTARY, "the model has none, or another function")
    return found
