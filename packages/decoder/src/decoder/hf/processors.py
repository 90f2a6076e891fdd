"""transformers' logits processors as our sampling parameters and, for those that have no such parameter, a hook."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import generation
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

# The fields of SamplingParams in the order in which `sampling.filters` applies them.
_FIELDS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    generation.SuppressTokensLogitsProcessor: ("suppress_tokens", lambda p: tuple(p.suppress_tokens.tolist())),
    generation.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", lambda p: float(p.penalty)),
    generation.TemperatureLogitsWarper: ("temperature", lambda p: float(p.temperature)),
    generation.TopKLogitsWarper: ("top_k", lambda p: int(p.top_k)),
    generation.TopPLogitsWarper: ("top_p", lambda p: float(p.top_p)),
    generation.MinPLogitsWarper: ("min_p", lambda p: float(p.min_p)),
    generation.EtaLogitsWarper: ("eta_cutoff", lambda p: float(p.epsilon)),
}
_ORDER = list(_FIELDS)
_GREEDY = _ORDER[:2]  # what is more is for sampling, and SamplingParams says greedy by its temperature

# Functions of the text and its scores alone: they may be called for any position, in any order, and for no position.
_PURE = {
    *_FIELDS,
    generation.EncoderNoRepeatNGramLogitsProcessor,
    generation.EncoderRepetitionPenaltyLogitsProcessor,
    generation.EpsilonLogitsWarper,
    generation.ExponentialDecayLengthPenalty,
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.InfNanRemoveLogitsProcessor,
    generation.LogitNormalization,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.PrefixConstrainedLogitsProcessor,
    generation.SequenceBiasLogitsProcessor,
    generation.SuppressTokensAtBeginLogitsProcessor,
    generation.TopHLogitsWarper,
    generation.TypicalLogitsWarper,
}
_ARGUMENTS = {
    generation.UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    generation.WatermarkLogitsProcessor: "watermarking_config",
    generation.SynthIDTextWatermarkLogitsProcessor: "watermarking_config",
}


def sampling_fields(processors: Sequence[LogitsProcessor], sampled: bool) -> tuple[dict[str, Any], LogitsProcessorList]:
    """The fields of `SamplingParams` that stand for the end of ``processors``, and the processors before it.

    transformers' order is kept: a processor becomes a field only if all behind it do, in the order of the fields.

    Args:
        sampled: whether tokens are drawn; if not, the most probable one is taken.

    Raises:
        ValueError: a processor may keep a state of its own, or is not known; the message names it.
    """
    for processor in processors:
        if type(processor) not in _PURE:
            raise ValueError(_refusal(processor))
    known, before, fields = _ORDER if sampled else _GREEDY, list(processors), {}
    while before and type(before[-1]) is generation.LogitNormalization:
        # It moves all scores alike, so that no choice changes.
        before.pop()
    last = len(known)
    while before and type(before[-1]) in known[:last] and _whole_text(before[-1]):
        last = known.index(type(before[-1]))
        name, read = _FIELDS[known[last]]
        fields[name] = read(before.pop())
    return fields, LogitsProcessorList(before)


def _whole_text(processor: LogitsProcessor) -> bool:
    """Whether a repetition penalty is over the whole text; a tensor holds the lengths of paddings, which we cut off."""
    return not isinstance(getattr(processor, "prompt_ignore_length", None), int)


def _refusal(processor: LogitsProcessor) -> str:
    argument = _ARGUMENTS.get(type(processor))
    if argument is not None:
        return f"{argument} cannot be honoured with custom_generate: leave it out, or generate without custom_generate"
    return (
        f"the logits processor {type(processor).__name__} is not one of transformers' own and may keep a state, which "
        "drafting would disturb: call Decoder.generate with a logits_hook, a function of the text alone"
    )


def as_hook(processors: LogitsProcessorList, device: torch.device) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """A logits_hook that applies the processors as transformers does: in float32, on a batch of one.

    Args:
        device: where the processors expect the ids of the text.
    """

    def hook(context: list[int], logits: torch.Tensor) -> torch.Tensor:
        return processors(torch.tensor([context], device=device), logits[None].float())[0]

    return hook
