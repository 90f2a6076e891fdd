"""What a model's parameters are made of: tensors of the file, in the order and with the numbers of transformers."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig

LAYER = re.compile(r"blk\.(\d+)\.(.+)")
"""Names of a layer's tensors."""

Order = Callable[[int], np.ndarray]
"""Of so many rows, the numbers of the stored ones in the order in which the model has them."""


class Source(NamedTuple):
    """What a parameter of a model is made of.

    Attributes:
        tensors: names of tensors in the file, to be joined along the rows of each expert.
        rows: the order of rows, if another one than in the file.
        columns: that of columns.
        number: what makes the model's numbers of the file's, in float32.
        transposed: whether rows are columns.
        axes: how many axes the model has, where the file may have one fewer.
        axis: where that is, of one.
        flat: whether the model has one axis alone.
        join: what makes it of its tensors, if they are not joined along their rows.
        wide: whether it is float32 in models of any dtype.
        part: which of the matrices of its one tensor it is, where there are several one behind the other.
    """

    tensors: tuple[str, ...]
    rows: Order | None = None
    columns: Order | None = None
    number: Callable[[torch.Tensor], torch.Tensor] | None = None
    transposed: bool = False
    axes: int = 0
    axis: int = 0
    flat: bool = False
    join: Callable[[list[torch.Tensor]], torch.Tensor] | None = None
    wide: bool = False
    part: int | None = None

    def shape(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """That of the parameter, of those of its tensors.

        Raises:
            ValueError, RuntimeError, IndexError: they cannot be joined.
        """
        first = shapes[0]
        if self.part is not None:
            return first[1:]
        if self.flat:
            return (math.prod(first),)
        if self.join is not None:
            return tuple(self.join([torch.empty(shape, device="meta") for shape in shapes]).shape)
        at = self.row_axis(first)
        made = list(first)
        made[at] = 0
        for shape in shapes:
            made[at] += shape[at]
            if shape[:at] + shape[at + 1 or len(shape) :] != first[:at] + first[at + 1 or len(first) :]:
                raise ValueError("they differ in more than their rows")
        if self.transposed:
            made[-2:] = made[:-3:-1]
        if len(made) < self.axes:
            made.insert(self.axis, 1)
        return tuple(made)

    def row_axis(self, shape: tuple[int, ...]) -> int:
        """Which axis of a tensor of the file are rows; of lists and of the biases of experts the last."""
        return -1 if len(shape) == 1 or self.tensors[0].endswith(".bias") else -2


Change = Callable[[PreTrainedConfig, str], dict]
"""What differs from a plain `Source` for a tensor of a layer, such as "attn_q.weight"; {} where nothing does."""


def unchanged(config: PreTrainedConfig, name: str) -> dict:
    return {}


def rotary_pairs(config: PreTrainedConfig, name: str) -> dict:
    """Llama's converter puts the two halves of each rotary pair side by side."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", 0)}
    count = heads.get(name.partition(".")[0])
    return {"rows": _halves(count)} if count else {}


def norms_around_one(config: PreTrainedConfig, name: str) -> dict:
    """Converters add one to the weights of norms, but for that of what a delta rule gives."""
    is_norm = "norm." in name and name.endswith(".weight") and not name.startswith("ssm_norm")
    return {"number": _less_one} if is_norm else {}


def gpt2(config: PreTrainedConfig, name: str) -> dict:
    stem, _, leaf = name.partition(".")
    return {"transposed": stem in ("attn_qkv", "attn_output", "ffn_up", "ffn_down") and leaf == "weight"}


def gpt_oss(config: PreTrainedConfig, name: str) -> dict:
    """Gates and what they gate stand in turn, and experts' rows are columns."""
    changed: dict = {"transposed": name.endswith("_exps.weight")}
    return changed | ({"rows": _in_turn} if name.startswith(("ffn_gate_exps", "ffn_up_exps")) else {})


def glm4_moe(config: PreTrainedConfig, name: str) -> dict:
    return {"wide": name == "exp_probs_b.bias"}


def ernie_moe(config: PreTrainedConfig, name: str) -> dict:
    """The router computes in float32, and its corrections are those of one group."""
    corrections = {"axes": 2} if name == "exp_probs_b.bias" else {}
    return corrections | ({"wide": True} if name.startswith(("exp_probs_b", "ffn_gate_inp.")) else {})


def compressed_keys(config: PreTrainedConfig, name: str) -> dict:
    """What restores keys [heads, compressed, size] and values [heads, size, compressed] is one matrix, head by head."""
    changed = glm4_moe(config, name)
    return changed | ({"join": _by_head} if name in ("attn_k_b.weight", "attn_v_b.weight") else {})


def lfm2(config: PreTrainedConfig, name: str) -> dict:
    return {"axes": 3, "axis": 1} if name == "shortconv.conv.weight" else {}


def shared_expert(config: PreTrainedConfig, name: str) -> dict:
    return {"axes": 2} if name == "ffn_gate_inp_shexp.weight" else {}


def qwen3_5(config: PreTrainedConfig, name: str) -> dict:
    """The heads of values that share a key's are far apart, and decays are no logarithms."""
    changed = _delta_rule(config, name)
    if config.linear_num_key_heads == config.linear_num_value_heads:
        return changed
    size, keys = config.linear_value_head_dim, 2 * config.linear_key_head_dim * config.linear_num_key_heads
    of_values = {"attn_gate": (0, size), "attn_qkv": (keys, size), "ssm_conv1d": (keys, size)}
    of_values |= dict.fromkeys(("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"), (0, 1))
    stem = name.partition(".")[0]
    if stem in of_values:
        changed["rows"] = _value_heads(config, *of_values[stem])
    elif stem == "ssm_out":
        changed["columns"] = _value_heads(config, 0, size)
    return changed


def qwen3_next(config: PreTrainedConfig, name: str) -> dict:
    """Queries, keys, values and gates are those of all heads behind each other, not by head."""
    changed = _delta_rule(config, name)
    stem = name.partition(".")[0]
    return changed | ({"rows": _by_key_head(config)} if stem in ("attn_qkv", "attn_gate") else {})


def mamba(config: PreTrainedConfig, name: str) -> dict:
    """Numbers of heads and norms of groups are columns of one, or lists by group."""
    changed: dict = {"axes": 3, "axis": 1} if name == "ssm_conv1d.weight" else {}
    if name in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        changed["flat"] = True
    return changed | ({"number": _logarithm_of_decay} if name == "ssm_a" else {})


def nemotron(config: PreTrainedConfig, name: str) -> dict:
    return mamba(config, name) | glm4_moe(config, name)


def granite_hybrid(config: PreTrainedConfig, name: str) -> dict:
    return mamba(config, name) | rotary_pairs(config, name)


def _delta_rule(config: PreTrainedConfig, name: str) -> dict:
    changed = norms_around_one(config, name) | shared_expert(config, name)
    if name == "ssm_a":
        changed["number"] = _logarithm_of_decay
    return changed | ({"axes": 3, "axis": 1} if name == "ssm_conv1d.weight" else {})


def _by_head(parts: list[torch.Tensor]) -> torch.Tensor:
    keys, values = parts
    return torch.cat((keys.mT, values), dim=1).flatten(0, 1)


def _less_one(numbers: torch.Tensor) -> torch.Tensor:
    return numbers - 1


def _logarithm_of_decay(numbers: torch.Tensor) -> torch.Tensor:
    return (-numbers).log()


def _halves(heads: int) -> Order:
    def order(rows: int) -> np.ndarray:
        numbers = np.arange(rows)
        # What does not fit is refused with its shape.
        return numbers if rows % (2 * heads) else numbers.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    return order


def _in_turn(rows: int) -> np.ndarray:
    return np.arange(rows).reshape(2, -1).T.reshape(-1)


def _value_heads(config: PreTrainedConfig, first: int, size: int) -> Order:
    """Behind the ``first`` rows, those of heads of a ``size``: of each key's head the first one, and so on."""
    keys = config.linear_num_key_heads

    def order(rows: int) -> np.ndarray:
        numbers = np.arange(rows)
        if (rows - first) % (keys * size):
            return numbers
        heads = numbers[first:].reshape(-1, keys, size).swapaxes(0, 1)
        return np.concatenate((numbers[:first], heads.reshape(-1)))

    return order


def _by_key_head(config: PreTrainedConfig) -> Order:
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim

    def order(rows: int) -> np.ndarray:
        numbers = np.arange(rows)
        if rows != 2 * heads * size + 2 * values:
            return numbers
        parts = np.split(numbers, np.cumsum((heads * size, heads * size, values)))
        return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).reshape(-1)

    return order
