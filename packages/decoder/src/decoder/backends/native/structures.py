"""What Python and the native library share: the structures and constants of library.h, in its order."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any


class Shared(ctypes.Structure):
    """A structure of library.h by the same name, whose size is compared with the library's when that is loaded."""


def members(*declared: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Fields as ctypes takes them, of declarations as C has them: a type, and the names of members of that type."""
    return [(name, kind) for kind, names in declared for name in names.split()]


FP32, BF16, INT8, QUANTISED = range(4)  # kinds of weights


class PackedWeight(Shared):
    _fields_ = members(
        (c_int64, "inputs outputs"),
        (c_void_p, "weight bias scales"),
        (c_int32, "kind"),
    )


MOST_PARTS = 3  # of a product with quantised weights


class QuantisedPart(Shared):
    _fields_ = members(
        (c_int64, "format outputs"),
        (c_void_p, "weight"),
    )


class Quantised(Shared):
    _fields_ = members(
        (c_int64, "count"),
        (QuantisedPart * MOST_PARTS, "parts"),
    )


class Format(Shared):
    _fields_ = members(
        (c_char_p, "name"),
        (c_int32, "number inputs bytes packed_bytes head_bytes infinite"),
    )


class Expert(Shared):
    _fields_ = members((PackedWeight, "gate up down"))


SILU, GELU, CLAMPED = range(3)  # how experts are gated
SOFTMAX, SIGMOID = range(2)  # how their weights are made
MOST_EXPERTS, MOST_GROUPS = 1024, 64


class Experts(Shared):
    _fields_ = members(
        (POINTER(Expert), "experts"),
        (c_int64, "count used"),
        (PackedWeight, "router shared_gate"),
        (c_void_p, "correction"),
        (c_int64, "groups groups_used"),
        (c_int32, "scoring normalised activation shared"),
        (c_float, "scaling limit alpha"),
    )


MOST_WIDTH = 8  # of convolutions


class Mixer(Shared):
    _fields_ = members(
        (PackedWeight, "gates"),
        (c_void_p, "from conv conv_bias decay decay_bias skip factors"),
        (c_int64, "keys values key_dim dim width group"),
        (c_float, "eps"),
        (c_int32, "delta gates_first"),
    )


class RecurrentState(Shared):
    _fields_ = members(
        (c_void_p, "before after kept"),
        (c_int64, "room"),
        (c_void_p, "replayed"),
        (c_int64, "replays folded count"),
        (c_void_p, "parents slots"),
    )


class Layer(Shared):
    _fields_ = members(
        (PackedWeight, "qkv o gate_up down"),
        (c_void_p, "norm_in norm_before_mlp head_norm"),
        (c_int64, "size heads kv_heads dim"),
        (c_float, "eps head_eps"),
        (c_void_p, "norm_behind_attention norm_behind_mlp"),
        (c_int32, "kind place gelu gated"),
        (c_int64, "rotary_dim"),
        (c_void_p, "sinks"),
        (POINTER(Experts), "experts"),
        (POINTER(Mixer), "mixer"),
    )


class SequenceKV(Shared):
    _fields_ = members(
        (c_void_p, "keys values"),
        (c_int64, "key_layer key_head key_slot value_layer value_head value_slot first length count"),
        (c_void_p, "mask"),
    )


class Attention(Shared):
    _fields_ = members(
        (POINTER(SequenceKV), "texts"),
        (c_void_p, "queries out"),
        (c_int64, "query_token heads kv_heads dim value_dim"),
        (c_float, "scaling"),
        (c_int32, "is_bf16"),
        (c_void_p, "sinks"),
        (c_int64, "step back"),
        (c_float, "softcap"),
    )


class Pass(Shared):
    _fields_ = members(
        (POINTER(POINTER(Layer)), "layers"),
        (c_int64, "first last rows"),
        (c_void_p, "states heads"),
        (c_int64, "heads_layer"),
        (POINTER(c_void_p), "cosines sines"),
        (c_void_p, "scratch"),
        (c_int64, "kinds"),
        (POINTER(RecurrentState), "memories"),
        (c_void_p, "mixed"),
    )


class Sampling(Shared):
    _fields_ = members(
        (c_void_p, "penalised"),
        (c_double, "penalty temperature log_min_p"),
        (c_uint64, "seed"),
        (c_int32, "do_sample"),
    )


class Head(Shared):
    _fields_ = members(
        (PackedWeight, "readers down"),
        (c_void_p, "norm_in norm_out"),
        (c_float, "eps"),
    )


class Drafter(Shared):
    _fields_ = members(
        (POINTER(Head), "heads"),
        (c_int64, "count size"),
        (c_int32, "conditioned chained vocabulary_is_bf16 embeddings_are_bf16"),
        (c_void_p, "embeddings ones"),
        (c_float, "embedding_eps logit_scale"),
        (PackedWeight, "vocabulary"),
        (c_void_p, "ids"),
    )


class Drafts(Shared):
    _fields_ = members(
        (Sampling, "choosing"),
        (c_int64, "position"),
        (c_void_p, "state"),
        (c_int32, "state_is_bf16 given"),
        (c_int64, "newest levels width beam"),
        (c_void_p, "out"),
    )


STRUCTURES = tuple(Shared.__subclasses__())
