"""A call: what is asked for, spelled out once, checked once, and handed on as one object."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from decoder.options import TokenSwiftOptions
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import LogitsHook
from decoder.text.prompts import Prompt, is_chat
from decoder.text.stops import Stop

P = ParamSpec("P")
Owner = TypeVar("Owner")
Asked = TypeVar("Asked")
T = TypeVar("T")


@dataclass(frozen=True)
class GenerationRequest:
    """What `Decoder.generate` and `Decoder.stream` are asked for: one text.

    Args:
        prompt: text, token ids, a LongTensor [n] or [1, n], or chat messages ({"role": ..., "content": ...} each) for
            the tokenizer's chat template.
        max_new_tokens: how many tokens to generate, exactly, unless a stop ends the text earlier. None goes on until a
            stop or the model's last position, in a cache that grows with the text; in a batch also no further than
            memory reaches.
        method: one of `decoder.methods()`. None takes `auto`; with independent verification, where the text depends on
            the method, it takes `tokenswift`, or `prompt-lookup` without heads.
        sampling: defaults to `SamplingParams()`.
        options: how to draft, defaults to `TokenSwiftOptions()`. They change the speed only, except for
            ``verification`` and ``kv_dtype``.
        stop: stop strings and/or token ids that end the text.
        ignore_eos: do not end at the end-of-sequence ids of the generation config or the tokenizer.
        return_logprobs: return each token's log-probability under the filtered distribution.
        logits_hook: ``hook(context_ids, logits [V]) -> logits [V]``, called for every position, before the penalty.
        top_logprobs: how many of the most likely tokens to return for each position, with their log-probabilities under
            the filtered distribution; at most V. 0 returns none.
        prompt_logprobs: return the log-probability of each token of the prompt under the model's own distribution, with
            so many of the most likely tokens; None does not. The whole prompt is computed then.
    """

    prompt: Prompt
    max_new_tokens: int | None
    method: str | None = None
    sampling: SamplingParams | None = None
    options: TokenSwiftOptions | None = None
    stop: Stop = None
    ignore_eos: bool = False
    return_logprobs: bool = False
    logits_hook: LogitsHook | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class BatchRequest:
    """What `Decoder.generate_batch` and `Decoder.stream_batch` are asked for: several texts, decoded together.

    Fields that are not listed are those of `GenerationRequest`.

    Args:
        prompts: in any of the forms that `GenerationRequest` takes.
        max_new_tokens: one for all, or a list with one per prompt, as are ``sampling`` and ``logits_hook``.
        stop: one for all; or a list with a value per prompt, at least one of which is None or a list, since a list of
            strings and ids alone is one value for all.
        max_batch: how many texts are decoded together at most; None takes as many as memory has room for, up to 256.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: int | Sequence[int | None] | None
    method: str | None = None
    sampling: SamplingParams | Sequence[SamplingParams | None] | None = None
    options: TokenSwiftOptions | None = None
    stop: Stop | Sequence[Stop] = None
    ignore_eos: bool = False
    return_logprobs: bool = False
    logits_hook: LogitsHook | Sequence[LogitsHook | None] | None = None
    max_batch: int | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    def each(self) -> list[GenerationRequest]:
        """The request of each prompt.

        Raises:
            ValueError: there are no prompts, or not as many values as prompts.
        """
        prompts = self.prompts
        if isinstance(prompts, str | bytes | torch.Tensor) or not isinstance(prompts, Sequence) or is_chat(prompts):
            raise ValueError("prompts must be a list with a prompt per text")
        if not prompts:
            raise ValueError("there are no prompts: give at least one")
        if self.max_batch is not None and (type(self.max_batch) is not int or self.max_batch < 1):
            raise ValueError(f"max_batch must be an integer of at least 1, or None, not {self.max_batch!r}")
        count = len(prompts)
        columns = zip(
            prompts,
            per_prompt("max_new_tokens", self.max_new_tokens, count),
            per_prompt("sampling", self.sampling, count),
            per_prompt("stop", self.stop, count, listed=lambda each: each is None or isinstance(each, list | tuple)),
            per_prompt("logits_hook", self.logits_hook, count),
            strict=True,
        )
        return [
            GenerationRequest(
                prompt,
                length,
                self.method,
                sampling,
                self.options,
                stop,
                self.ignore_eos,
                self.return_logprobs,
                hook,
                self.top_logprobs,
                self.prompt_logprobs,
            )
            for prompt, length, sampling, stop, hook in columns
        ]


def asked_with(
    kind: Callable[P, Asked],
) -> Callable[[Callable[[Owner, Asked], T]], Callable[Concatenate[Owner, P], T]]:
    """Let a method that takes a request be called with the request's fields, by position and by name."""

    def calling(answer: Callable[[Owner, Asked], T]) -> Callable[Concatenate[Owner, P], T]:
        @wraps(answer)
        def call(owner: Owner, *args: P.args, **kwargs: P.kwargs) -> T:
            return answer(owner, kind(*args, **kwargs))

        return call

    return calling


def per_prompt(name: str, value: Any, count: int, listed: Callable[[Any], bool] = lambda each: True) -> list:
    """The values of an argument for ``count`` prompts, if ``value`` is a list with one per prompt or one value for all.

    Where one value can itself be a list, ``listed`` decides: a list counts as one of values per prompt if ``listed`` is
    true of any of its entries.
    """
    if not isinstance(value, list | tuple) or not any(map(listed, value)):
        return [value] * count
    if len(value) != count:
        without = f"prompt {len(value)} has none" if len(value) < count else f"there is no prompt {count}"
        raise ValueError(
            f"{name} has {len(value)} entries for {count} prompts ({without}): give one for each or for all"
        )
    return list(value)
