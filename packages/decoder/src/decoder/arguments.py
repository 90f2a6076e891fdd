"""Checks the arguments of a generation."""

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from decoder.checks import meant, shown
from decoder.drafters import METHODS
from decoder.drafters.draft_model import DraftModel
from decoder.drafters.triforce import TriForce
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.heads import Heads
from decoder.model.yarn import hint_for_longer
from decoder.options import TokenSwiftOptions
from decoder.request import GenerationRequest
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import LogitsHook
from decoder.text.prompts import prompt_ids
from decoder.text.stops import check_stop, eos_ids

if TYPE_CHECKING:
    from decoder.decoder import Decoder


@dataclass(frozen=True)
class Arguments:
    """The checked arguments for one prompt; fields not listed here are those of `GenerationRequest`.

    Attributes:
        context: the prompt's token ids.
        limit: how many tokens may be generated.
        open_ended: whether no length was asked for, so that ``limit`` goes to the model's last position.
        method: the name of the method.
        heads: the draft heads that the method uses, if any.
        stop_ids: tokens that end the text, end-of-sequence ids included unless they are ignored.
        stop_strings: strings that end the text.
        shown: special tokens that are part of the text.
    """

    context: list[int]
    limit: int
    open_ended: bool
    method: str
    heads: Heads | None
    sampling: SamplingParams
    options: TokenSwiftOptions
    stop_ids: set[int]
    stop_strings: list[str]
    return_logprobs: bool
    logits_hook: LogitsHook | None
    top_logprobs: int
    prompt_logprobs: int | None = None
    shown: frozenset[int] = frozenset()

    def by_name(self) -> dict[str, object]:
        """All that decides what is generated and how, by its name in words."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["heads"] = None if self.heads is None else self.heads.kind
        values["logits_hook"] = self.logits_hook is not None
        values["prompt"] = values.pop("context")
        values["length"] = values.pop("limit"), values.pop("open_ended")
        values["stop"] = sorted(values.pop("stop_ids")), values.pop("stop_strings")
        return values


def check_arguments(dec: "Decoder", request: GenerationRequest) -> Arguments:
    """Check what is asked of a decoder; raises ValueError with a message that says what to change."""
    sampling, options = request.sampling or SamplingParams(), request.options or TokenSwiftOptions()
    for name, value, kind in (("sampling", sampling, SamplingParams), ("options", options, TokenSwiftOptions)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
    for name, switch in (("ignore_eos", request.ignore_eos), ("return_logprobs", request.return_logprobs)):
        if not isinstance(switch, bool):
            raise ValueError(f"{name} must be true or false, not {shown(switch)}")
    hook, top_logprobs = request.logits_hook, request.top_logprobs
    if hook is not None and not callable(hook):
        raise ValueError(f"logits_hook must be a function, not {type(hook).__name__}")
    vocab_size = dec.target.vocab_size
    for name, count in (("top_logprobs", top_logprobs), ("prompt_logprobs", request.prompt_logprobs or 0)):
        if type(count) is not int or not 0 <= count <= vocab_size:
            raise ValueError(
                f"{name} must be an integer of at least 0 and at most {vocab_size}, the size of the vocabulary, "
                f"not {shown(count)}"
            )
    context = prompt_ids(request.prompt, dec.tokenizer, vocab_size, dec.sanitize_control_tokens)
    limit = _length_limit(dec, len(context), request.max_new_tokens)
    method, heads = _method(dec, request.method, options)
    stop_ids, strings = check_stop(request.stop, dec.tokenizer, vocab_size)
    if not request.ignore_eos:
        stop_ids |= eos_ids(dec.model, dec.tokenizer)
    return Arguments(
        context,
        limit,
        request.max_new_tokens is None,
        method,
        heads,
        sampling,
        options,
        stop_ids,
        strings,
        request.return_logprobs,
        hook,
        top_logprobs,
        request.prompt_logprobs,
    )


def _length_limit(dec: "Decoder", prompt_tokens: int, max_new_tokens: int | None) -> int:
    """How many tokens may be generated."""
    positions = dec.model.config.max_position_embeddings
    wanted = max_new_tokens
    if wanted is None:
        wanted = max(0, positions - prompt_tokens)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0:
        raise ValueError(f"max_new_tokens must be an integer of at least 0, or None, not {shown(max_new_tokens)}")
    if prompt_tokens + wanted > positions:
        raise ValueError(
            f"prompt ({prompt_tokens} tokens) + max_new_tokens ({shown(wanted)}) is beyond the {positions} positions "
            f"of the model: shorten one of them{hint_for_longer(dec.model.config)}"
        )
    return wanted


def usable_methods(dec: "Decoder", options: TokenSwiftOptions | None = None) -> list[str]:
    """The names of the methods for which a decoder has all that they draft with."""
    found = []
    for name in METHODS:
        with suppress(ValueError):
            _method(dec, name, options or TokenSwiftOptions())
            found.append(name)
    return found


def _method(dec: "Decoder", method: str | None, options: TokenSwiftOptions) -> tuple[str, Heads | None]:
    if method is None and options.verification == "exact":
        method = "auto"
    elif method is None:
        method = "tokenswift" if dec.heads else "prompt-lookup"
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"unknown method {shown(method)}{meant(method, METHODS)}: choose one of {', '.join(METHODS)}")
    if issubclass(METHODS[method], CostTuned) and options.verification != "exact":
        raise ValueError(
            "cost-tuned trees (methods auto and suffix) follow the clock, and so would the text of "
            f"{options.verification} verification: take another method, or exact verification"
        )
    if issubclass(METHODS[method], DraftModel | TriForce) and dec.draft_target is None:
        raise ValueError(f"method {method!r} needs a small model with the same vocabulary: give draft_model=")
    kinds = METHODS[method].heads_kinds
    if not kinds:
        return method, None
    kind = next((kind for kind in kinds if kind in dec.heads), None)
    if kind is None and METHODS[method].needs_heads:
        raise ValueError(
            f"method {method!r} needs draft heads ({' or '.join(kinds)}): give heads=, or use 'prompt-lookup'"
        )
    return method, None if kind is None else dec.heads[kind]
