"""What a request asks for: the bodies of OpenAI's protocol as one checked record."""

import inspect
import secrets
from collections.abc import Mapping
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
    MESSAGE,
    MOST_CHOICES,
    PART,
    STREAM_OPTIONS,
    read,
    refuse,
    require,
)
from decoder.serve.kinds import MESSAGES, OBJECT, PROMPTS, TEXT
from decoder.serve.shapes import constraint_of
from decoder.serve.tools import Tools, calls_of, tools_of
from decoder.text.prompts import Prompt

# Arguments of transformers' `apply_chat_template`, and what it gives to templates itself.
_NOT_OF_TEMPLATES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


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
        model: the model that is asked for; None for whichever is served.
        skip_special_tokens: whether special tokens are left out of the text.
        tools: what the answer may or must call.
        template_kwargs: what a chat's template is given beside messages and tools.
        separate_reasoning: whether an answer's reasoning is apart from its content.
        include_reasoning: whether the answer has its reasoning at all, then.
    """

    chat: bool
    prompts: list[Prompt]
    n: int
    candidates: int
    echo: bool
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
    tools: Tools | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    separate_reasoning: bool = True
    include_reasoning: bool = True

    @property
    def choices(self) -> int:
        """How many texts are made."""
        return self.candidates * len(self.prompts)


def parse(body: Any, chat: bool) -> Asked:
    """The record of a body of `/v1/chat/completions` or `/v1/completions`.

    Raises:
        ApiError: 400, with the field that is at fault.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    values = read(body, CHAT if chat else COMPLETION)
    candidates = values["best_of"] or values["n"]
    if candidates < values["n"]:
        refuse("best_of", f"must be at least n, which is {values['n']}")
    if candidates > values["n"] and values["stream"]:
        refuse("best_of", "cannot be streamed where it is more than n: the best are known at the end")
    logprobs, top_logprobs = _logprobs(values, chat)
    stop = values["stop"]
    shaped_by, constraint = constraint_of(values)
    asked = Asked(
        chat=chat,
        prompts=[messages_of(values["messages"])] if chat else _prompts(values["prompt"]),
        n=values["n"],
        candidates=candidates,
        echo=not chat and values["echo"],
        sampling=_sampling({**values, "constraint": constraint}, candidates),
        shaped_by=shaped_by,
        max_tokens=values.get("max_completion_tokens") or values["max_tokens"],
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
        **(_of_chat(values) if chat else {}),
    )
    if asked.choices > MOST_CHOICES:
        param = "n" if candidates == values["n"] else "best_of"
        raise ApiError(400, f"prompts times {param} may be at most {MOST_CHOICES}, not {asked.choices}", param)
    if asked.echo and asked.logprobs:
        refuse("echo", "cannot go with logprobs: those of prompts are not computed")
    return asked


def template_kwargs_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat's template is given beside messages and tools. Raises ApiError 400."""
    given, effort = values["chat_template_kwargs"], values.get("reasoning_effort")
    # Templates know these by other names than OpenAI's protocol does.
    of_effort = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    for name in given:
        if name in _NOT_OF_TEMPLATES:
            refuse(inside("chat_template_kwargs", name), "is no variable of a template that requests can set")
    return of_effort | given


def _of_chat(values: Mapping[str, Any]) -> dict[str, Any]:
    """What only chats can be asked for."""
    return dict(
        tools=tools_of(values),
        template_kwargs=template_kwargs_of(values),
        separate_reasoning=values["separate_reasoning"] and values["reasoning_format"] != "none",
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


def _logprobs(values: Mapping[str, Any], chat: bool) -> tuple[bool, int]:
    """Whether log-probabilities are asked for, and of how many of the most likely tokens at each position.

    A chat has a field for either, a completion one for both.
    """
    if not chat:
        return values["logprobs"] is not None, values["logprobs"] or 0
    if values["top_logprobs"] and not values["logprobs"]:
        refuse("top_logprobs", "needs log-probabilities: send logprobs as true, too")
    return values["logprobs"], values["top_logprobs"]


def _prompts(value: Any) -> list[Prompt]:
    require(PROMPTS, value, "prompt")
    whole = isinstance(value, str) or all(type(one) is int for one in value)
    return [value] if whole else value


def messages_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat as its template takes them. Raises ApiError 400."""
    require(MESSAGES, value, "messages")
    return [_message(one, f"messages[{index}]") for index, one in enumerate(value)]


def _message(value: Any, place: str) -> dict[str, Any]:
    require(OBJECT, value, place)
    values = read(value, MESSAGE, place)
    if isinstance(values["content"], list):
        values["content"] = "".join(
            _part(part, f"{place}.content[{index}]") for index, part in enumerate(values["content"])
        )
    if values["tool_calls"]:
        values["tool_calls"] = calls_of(values["tool_calls"], f"{place}.tool_calls")
        values["content"] = values["content"] or ""
    else:
        values["tool_calls"] = None
    reasoning = values.pop("reasoning")
    values["reasoning_content"] = values["reasoning_content"] or reasoning
    for name in ("role", "content"):
        require(TEXT, values[name], f"{place}.{name}")
    return {name: each for name, each in values.items() if each is not None}


def _part(value: Any, place: str) -> str:
    require(OBJECT, value, place)
    values = read(value, PART, place)
    for name in ("type", "text"):
        require(TEXT, values[name], f"{place}.{name}")
    return values["text"]
