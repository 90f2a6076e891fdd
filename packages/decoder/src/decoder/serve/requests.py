"""What a request asks for: the bodies of OpenAI's protocol as one checked record."""

import inspect
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoder.sampling.params import SamplingParams
from decoder.serve.body import inside
from decoder.serve.errors import ApiError
from decoder.serve.fields import (
    CHAT,
    COMPLETION,
    LARGEST_SEED,
    LOGPROBS,
    MOST_CHOICES,
    REASONING,
    RESPONSE,
    STREAM_OPTIONS,
    TEXT_OF_RESPONSE,
    read,
    read_body,
    refuse,
    require,
)
from decoder.serve.kept import Item, Kept
from decoder.serve.kinds import INPUT, PROMPTS
from decoder.serve.messages import messages_of, messages_of_items
from decoder.serve.shapes import constraint_of
from decoder.serve.tools import Tools, tools_of
from decoder.text.prompts import Prompt

# Arguments of transformers' `apply_chat_template`, and what it gives to templates itself.
_NOT_OF_TEMPLATES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


@dataclass(frozen=True)
class OfResponse:
    """What a request of `/v1/responses` has beside a chat's.

    Attributes:
        told: the fields that the answer repeats.
        items: those of the whole conversation, the request's at the end.
        store: whether the answer is kept, for a request that goes on.
    """

    told: Mapping[str, Any]
    items: list[Item]
    store: bool


@dataclass(frozen=True)
class Asked:
    """A checked request.

    Attributes:
        chat: whether it is a chat and not a completion.
        prompts: one prompt for a chat; one or more for a completion.
        n: how many choices for each prompt.
        candidates: how many texts are made for each prompt; the most likely ones are its choices.
        echo: whether the text begins with the prompt's.
        sampling: of the first choice; choice i draws with seed + i.
        shaped_by: the place in the body that asks for the constraint of ``sampling``, if it has one.
        max_tokens: how many tokens may be generated; None for as many as the server allows.
        stop: strings that end the text.
        stop_token_ids: tokens that end the text.
        ignore_eos: whether the text goes on past an end-of-sequence token.
        method: how to draft; None for the server's choice.
        stream: whether the answer comes in pieces.
        include_usage: whether a stream ends with the counts of tokens.
        logprobs: whether tokens come with their log-probabilities.
        top_logprobs: how many of the most likely tokens come with each of them.
        prompt_logprobs: how many of them come with each token of the prompt; None if its tokens come without.
        model: the model that is asked for; None for whichever is served.
        skip_special_tokens: whether special tokens are left out of the text.
        tools: what the answer may or must call.
        template_kwargs: what a chat's template is given beside messages and tools.
        separate_reasoning: whether an answer's reasoning is apart from its content.
        include_reasoning: whether the answer has its reasoning at all, then.
        truncate: whether the oldest messages are left out where all have too many tokens.
        response: what only `/v1/responses` has; None for the other routes.
    """

    chat: bool
    prompts: list[Prompt]
    n: int
    candidates: int
    sampling: SamplingParams
    shaped_by: str | None
    max_tokens: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    method: str | None
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    model: str | None
    skip_special_tokens: bool = True
    echo: bool = False
    prompt_logprobs: int | None = None
    tools: Tools | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    separate_reasoning: bool = True
    include_reasoning: bool = True
    truncate: bool = False
    response: OfResponse | None = None

    @property
    def likely_in_prompt(self) -> int | None:
        """How many of the most likely tokens are computed at each token of the prompt; None if it needs none."""
        asked = [self.prompt_logprobs, self.top_logprobs if self.echo and self.logprobs else None]
        return max((one for one in asked if one is not None), default=None)

    @property
    def least_tokens(self) -> int:
        """For how many tokens there must be room behind the prompt."""
        return 1 if self.max_tokens is None else self.max_tokens

    @property
    def prompt_field(self) -> str:
        """The field of the body that has the prompt."""
        return "input" if self.response is not None else "messages" if self.chat else "prompt"

    @property
    def choices(self) -> int:
        """How many texts are made."""
        return self.candidates * len(self.prompts)


Parse = Callable[[Any], Asked]
"""Reads a body; raises ApiError 400, with the field that is at fault."""


def parse(body: Any, chat: bool) -> Asked:
    """The record of a body of `/v1/chat/completions` or `/v1/completions`.

    Raises:
        ApiError: 400, with the field that is at fault.
    """
    values = read_body(body, CHAT if chat else COMPLETION)
    if chat:
        return _asked(values, [messages_of(values["messages"])], **_of_chat(values))
    return _asked(values, _prompts(values["prompt"]), echo=values["echo"])


def parse_response(body: Any, kept: Kept) -> Asked:
    """The record of a body of `/v1/responses`, which may go on behind one that is ``kept``.

    Raises:
        ApiError: 400, with the field that is at fault.
    """
    values = read_body(body, RESPONSE)
    require(INPUT, values["input"], "input")
    text = read(values["text"], TEXT_OF_RESPONSE, "text")
    effort = read(values["reasoning"], REASONING, "reasoning")["effort"]
    before = kept.items_behind(values["previous_response_id"])
    own = [{"type": "message", "role": "user", "content": values["input"]}]
    own = kept.resolved(own if isinstance(values["input"], str) else values["input"])
    messages = messages_of_items([*before, *own], len(before))
    if values["instructions"]:
        messages.insert(0, {"role": "system", "content": values["instructions"]})
    told = {name: body.get(name) for name in _TOLD} | {
        "text": {"format": text["format"] or {"type": "text"}, "verbosity": text["verbosity"] or "medium"},
        "reasoning": {"effort": effort, "summary": None},
        **{name: values[name] for name in _TOLD_WITH_DEFAULT},
        "tools": values["tools"] or [],
        "tool_choice": values["tool_choice"] or "auto",
    }
    values |= {"response_format": text["format"], "verbosity": text["verbosity"], "reasoning_effort": effort}
    values |= {"logprobs": bool(values["top_logprobs"]) or LOGPROBS in values["include"]}
    values |= {"n": 1, "best_of": None, "prompt_logprobs": None, "max_tokens": values["max_output_tokens"]}
    return _asked(
        values,
        [messages],
        "text.format",
        **_of_chat(values, flat=True),
        truncate=values["truncation"] == "auto",
        response=OfResponse(told, [*before, *own], values["store"]),
    )


_TOLD = (
    *("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls", "user"),
    *("prompt_cache_key", "safety_identifier"),
)
_TOLD_WITH_DEFAULT = ("metadata", "parallel_tool_calls", "top_logprobs", "truncation", "store")


def _asked(
    values: Mapping[str, Any], prompts: list[Prompt], format_place: str = "response_format", **more: Any
) -> Asked:
    candidates = values["best_of"] or values["n"]
    if candidates < values["n"]:
        refuse("best_of", f"must be at least n, which is {values['n']}")
    if candidates > values["n"] and values["stream"]:
        refuse("best_of", "cannot be streamed where it is more than n: the best are known at the end")
    logprobs, top_logprobs = _logprobs(values)
    stop = values["stop"]
    shaped_by, constraint = constraint_of(values, format_place)
    asked = Asked(
        chat="messages" in values or "input" in values,
        prompts=prompts,
        n=values["n"],
        candidates=candidates,
        sampling=_sampling({**values, "constraint": constraint}, candidates),
        shaped_by=shaped_by,
        max_tokens=values.get("max_completion_tokens") or values["max_tokens"],
        prompt_logprobs=values["prompt_logprobs"],
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=values["stop_token_ids"],
        ignore_eos=values["ignore_eos"],
        method=values["method"],
        stream=values["stream"],
        include_usage=read(values["stream_options"], STREAM_OPTIONS, "stream_options")["include_usage"],
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        model=values["model"],
        skip_special_tokens=values["skip_special_tokens"],
        **more,
    )
    if asked.choices > MOST_CHOICES:
        param = "n" if candidates == values["n"] else "best_of"
        raise ApiError(400, f"prompts times {param} may be at most {MOST_CHOICES}, not {asked.choices}", param)
    if asked.prompt_logprobs is not None and asked.stream:
        refuse("prompt_logprobs", "cannot be streamed: send echo with logprobs to /v1/completions")
    return asked


def template_kwargs_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat's template is given beside messages and tools. Raises ApiError 400."""
    given, effort = values["chat_template_kwargs"], values.get("reasoning_effort")
    # Templates know these by other names than OpenAI's protocol does.
    of_effort = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if values.get("verbosity") is not None:
        of_effort["verbosity"] = values["verbosity"]
    for name in given:
        if name in _NOT_OF_TEMPLATES:
            refuse(inside("chat_template_kwargs", name), "is no variable of a template that requests can set")
    return of_effort | given


def _of_chat(values: Mapping[str, Any], flat: bool = False) -> dict[str, Any]:
    """What only chats can be asked for; ``flat`` is of `/v1/responses`."""
    return dict(
        tools=tools_of(values, flat),
        template_kwargs=template_kwargs_of(values),
        separate_reasoning=values.get("separate_reasoning", True) and values.get("reasoning_format") != "none",
        include_reasoning=values["include_reasoning"],
    )


def _sampling(values: Mapping[str, Any], candidates: int) -> SamplingParams:
    honoured = [field.name for field in fields(SamplingParams) if values.get(field.name) is not None]
    given = {name: values[name] for name in honoured}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): number for token, number in given["logit_bias"].items()}
    if isinstance(given.get("bad_words"), str):
        given["bad_words"] = [given["bad_words"]]
    # Choice i draws with seed + i, which must be a seed too.
    largest = LARGEST_SEED - candidates + 1
    if given.setdefault("seed", secrets.randbelow(largest)) > largest:
        refuse("seed", f"may be at most {largest:,} for {candidates} texts")
    try:
        return SamplingParams(**given)
    except ValueError as error:
        # Its message begins with the field's name.
        raise ApiError(400, str(error), str(error).split()[0]) from None


def _logprobs(values: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether log-probabilities are asked for, and of how many of the most likely tokens at each position.

    A chat has a field for either, a completion one for both.
    """
    if "top_logprobs" not in values:
        return values["logprobs"] is not None, values["logprobs"] or 0
    if values["top_logprobs"] and not values["logprobs"]:
        refuse("top_logprobs", "needs log-probabilities: send logprobs as true, too")
    return values["logprobs"], values["top_logprobs"]


def _prompts(value: Any) -> list[Prompt]:
    require(PROMPTS, value, "prompt")
    whole = isinstance(value, str) or all(type(one) is int for one in value)
    return [value] if whole else value
