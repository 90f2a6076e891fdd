"""A model and heads of random weights, made from a configuration alone: what they cost is real, what they say is noise.

Acceptance on them means nothing, so methods cannot be judged by it; passes, levels of heads and sampling can be timed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

import decoder
from decoder.heads import EAGLE3, Heads
from decoder.parts import QUANTISED_DTYPES, Eagle3Config, available_memory, device_named, quantise, refuse_unsupported
from ts_eval.comparing.decoders import DEFAULT_KINDS, Sources
from ts_eval.comparing.memory import short_of_memory
from ts_eval.comparing.method_spec import NEED_DRAFT_MODEL, MethodSpec
from ts_eval.comparing.prompts import Prompt
from ts_eval.planning.model_shape import held_dtype, read_config, read_shape

_STD = 0.02
_PARAMETERS_OF_HEADS = {"gated": 12, "conditioned": 2, "eagle3": 9}
"""In squares of the hidden size, per head; one of other kinds. A draft model has some 27 in all."""


@dataclass(frozen=True)
class RandomSources(Sources):
    """As `Sources`, with the configuration's name as ``model`` and kinds of heads in place of checkpoints.

    Args:
        seed: of weights and prompt.
    """

    seed: int = 0

    @classmethod
    def of(cls, specs: Sequence[MethodSpec], config: str, seed: int) -> "RandomSources":
        """What ``specs`` run with: for each method that uses heads, those of the kind that suits it best."""
        heads = {spec.text: f"random {DEFAULT_KINDS[spec.name]}" for spec in specs if spec.name in DEFAULT_KINDS}
        return cls(config, None, heads, seed)

    def refuse_missing(self, specs: Sequence[MethodSpec]) -> None:
        """Refuse, before anything is made, a configuration that cannot be read or served, and draft models."""
        refuse_unsupported(read_config(self.model))
        if name := next((spec.name for spec in specs if spec.name in NEED_DRAFT_MODEL), None):
            raise ValueError(f"{name} drafts with a small model, and --random-weights makes none: leave it out")

    def weights(self) -> dict[str, str | None]:
        """Nothing: the seed tells weights apart."""
        return {}

    def load(self, device: str, dtype: str, bitwise: bool | None = None) -> "dict[str | None, decoder.Decoder]":
        """As `Sources.load`, without a tokenizer: made on the device in the configuration's dtype, held in ``dtype``.

        So they are numbers that a checkpoint could hold, which decides how a CPU packs them (`packed_weight`).

        Raises:
            ValueError: an unknown device or dtype.
            MemoryError: they do not fit.
        """
        where = device_named(device)
        wanted: bool | Literal["auto"] = "auto" if bitwise is None else bitwise
        if dtype == "auto" and where.type == "cpu":
            dtype = "float32"
        config = read_config(self.model)
        held = held_dtype(config, dtype)
        shape = read_shape(self.model, dtype)
        kinds = list(dict.fromkeys(self.heads.values()))
        heads_size = shape.heads_bytes(3) * sum(_PARAMETERS_OF_HEADS.get(kind.split()[1], 1) for kind in kinds)
        if dtype in QUANTISED_DTYPES and where.type != "cpu":
            raise ValueError(f"dtype {dtype!r} is for a CPU: use device 'cpu', or another dtype")
        needed = max(shape.weight_bytes, read_shape(self.model).weight_bytes) + heads_size
        free = available_memory(where)
        name = dtype if dtype in QUANTISED_DTYPES else str(held).removeprefix("torch.")
        sentence = f"random weights of {self.model} take {needed / 1e9:,.1f} GB in {name}"
        if needed > free:
            raise MemoryError(f"{sentence} and {free / 1e9:,.1f} GB are free on {where}: take a smaller model or dtype")
        try:
            with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
                torch.manual_seed(self.seed)
                with torch.device(where):
                    model = AutoModelForCausalLM.from_config(config, dtype=held_dtype(config, "auto")).eval()
                if dtype in QUANTISED_DTYPES:
                    quantise(model, dtype, held)
                elif model.dtype != held:
                    model.to(held)
                loaded: dict[str | None, decoder.Decoder] = {None: decoder.Decoder(model, bitwise=wanted)}
                for kind in kinds:
                    heads = _random_heads(kind, config, where, held)
                    loaded[kind] = decoder.Decoder(model, heads=heads, bitwise=wanted)
        except (RuntimeError, MemoryError) as error:
            raise short_of_memory(error, f"{sentence}, and memory ran out: take a smaller model or dtype") from error
        return loaded

    def prompt(self, vocab_size: int, count: int) -> Prompt:
        """``count`` random tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        return Prompt("random tokens", tuple(torch.randint(vocab_size, (count,), generator=generator).tolist()))


def _random_heads(name: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> Heads:
    kind = name.removeprefix("random ")
    with torch.device(device):
        eagle3 = kind == EAGLE3
        heads: Heads = (
            decoder.Eagle3DraftModel(Eagle3Config.for_model(config))
            if eagle3
            else decoder.DraftHeads(config.hidden_size, kind=kind)
        ).to(dtype)
    for parameter in heads.parameters():
        # New heads are zeros, which can be multiplied faster than other numbers.
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=_STD)
    heads.source = name
    return heads
