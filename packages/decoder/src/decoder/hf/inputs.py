"""What transformers' `generate` hands to a decoding loop: checked, and the prompts without their padding."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from decoder.cache.argument import CACHE_NAMES

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_OF_MODES = (
    "num_beams",
    "constraints",
    "force_words_ids",
    "penalty_alpha",
    "dola_layers",
    "use_mtp",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
)
_HARMLESS = {"attention_mask", "position_ids", *CACHE_NAMES, "use_cache", "logits_to_keep"}


def refuse_unsupported(model: PreTrainedModel, config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for what would change the text or the result and cannot be honoured; the message names it."""
    if "prepare_inputs_for_generation" in vars(model):
        # How PEFT hands prompt learning's virtual tokens to each pass, which a loop of our own would leave out.
        raise ValueError(
            "the model's inputs are prepared by an adapter with virtual tokens (prompt or prefix tuning), which "
            "custom_generate cannot honour: adapters that change layers, such as LoRA, work"
        )
    mode = config.get_generation_mode()
    if mode not in _MODES:
        default = GenerationConfig()
        named = [
            name for name in _OF_MODES if getattr(config, name, None) not in (None, getattr(default, name, None), 1)
        ]
        raise ValueError(
            f"{' and '.join(named) or 'this configuration'} asks for {mode.value.replace('_', ' ')}: custom_generate "
            "decodes greedily or samples, so leave that out, or generate without custom_generate"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name) and config.return_dict_in_generate:
            raise ValueError(f"{name} is not available with custom_generate, whose passes are of drafted tokens too")
    if config.cache_implementation == "quantized":
        raise ValueError("cache_implementation='quantized' would change the text: leave it out with custom_generate")
    given = [name for name in CACHE_NAMES if getattr(model_kwargs.get(name), "_is_user_defined", False)]
    if given:
        raise ValueError(f"{given[0]} cannot be given with custom_generate, which keeps a cache of its own")
    others = sorted(name for name, value in model_kwargs.items() if name not in _HARMLESS and value is not None)
    if others:
        raise ValueError(f"{others[0]} cannot be honoured with custom_generate: give input_ids and attention_mask")


def unpadded(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """The prompts of ``input_ids`` [rows, n] without the padding on their left.

    Raises:
        ValueError: the attention mask leaves out other tokens than those, or positions are not those of the prompt.
    """
    mask = model_kwargs.get("attention_mask")
    kept = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device) != 0
    if (kept[:, 1:] < kept[:, :-1]).any() or not kept[:, -1:].all():
        raise ValueError("attention_mask may leave out padding on the left only: set tokenizer.padding_side='left'")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = kept.long().cumsum(-1) - 1
        if positions.shape != expected.shape or ((positions.to(expected.device) != expected) & kept).any():
            raise ValueError("position_ids other than 0, 1, 2, ... cannot be honoured with custom_generate")
    return [row[keep].tolist() for row, keep in zip(input_ids, kept, strict=True)]
