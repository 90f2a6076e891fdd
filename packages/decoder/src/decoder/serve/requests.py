"""What a request asks for: the bodies of OpenAI's protocol as one checked record."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decoder.sampling.params import SamplingParams
from decoder.serve.errors import ApiError
from decoder.serve.fields import Fields, refuse_unsupported
from decoder.text.prompts import Prompt

MOST_CHOICES = 128  # of one request
_COMPLETION_TOKENS = 16  # max_tokens of a completion that does not give it, as in OpenAI's protocol
_MOST_OF_CHAT, _MOST_OF_COMPLETION = 20, 5  # most likely tokens with log-probabilities, as in OpenAI's protocol
_LARGEST_SEED = 2**63 - 1
_NUMBERS = ("temperature", "top_p", "min_p", "eta_cutoff", "repetition_penalty")
_INTEGERS = ("top_k", "penalty_window")


@dataclass(frozen=True)
class Asked:
    """A checked request.

    Attributes:
        chat: whether it is a chat and not a completion.
        prompts: one prompt for a chat; one or more for a completion.
        n: how many choices for each prompt.
        sampling: of the first choice; choice i draws with seed + i.
        max_tokens: how many tokens may be generated; None for as many as the server allows.
        stop: strings that end the text.
        ignore_eos: whether the text goes on past an end-of-sequence token.
        method: how to draft; None for the server's choice.
        stream: whether the answer comes in pieces.
        include_usage: whether a stream ends with the counts of tokens.
        logprobs: whether tokens come with their log-probabilities.
        top_logprobs: how many of the most likely tokens come with each of them.
        model: the model that is asked for; None for whichever is served.
    """

    chat: bool
    prompts: list[Prompt]
    n: int
    sampling: SamplingParams
    max_tokens: int | None
    stop: list[str]
    ignore_eos: bool
    method: str | None
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    model: str | None

    @property
    def choices(self) -> int:
        """How many texts are asked for."""
        return self.n * len(self.prompts)


def parse(body: Any, chat: bool) -> Asked:
    """The record of a body of `/v1/chat/completions` or `/v1/completions`.

    Raises:
        ApiError: 400, with the field that is at fault.
    """
    fields = Fields(body)
    refuse_unsupported(fields.body)
    n = fields.integer("n", 1, MOST_CHOICES) or 1
    if fields.integer("best_of", 1, MOST_CHOICES, n) != n:
        raise ApiError(400, "best_of is not supported: leave it out, or give n", "best_of")
    options = fields.body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object", "stream_options")
    logprobs, top_logprobs = _logprobs(fields, chat)
    asked = Asked(
        chat=chat,
        prompts=[_messages(fields)] if chat else _prompts(fields),
        n=n,
        sampling=_sampling(fields, n),
        max_tokens=_max_tokens(fields, chat),
        stop=fields.stops(),
        ignore_eos=fields.flag("ignore_eos"),
        method=fields.text("method"),
        stream=fields.flag("stream"),
        include_usage=Fields(options or {}).flag("include_usage"),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        model=fields.text("model"),
    )
    if asked.choices > MOST_CHOICES:
        raise ApiError(400, f"prompts times n may be at most {MOST_CHOICES}, not {asked.choices}", "n")
    return asked


def _sampling(fields: Fields, n: int) -> SamplingParams:
    seed = fields.integer("seed", 0, _LARGEST_SEED - n + 1)
    given: dict[str, Any] = {"seed": secrets.randbelow(_LARGEST_SEED - n + 1) if seed is None else seed}
    values: dict[str, Any] = {name: fields.number(name) for name in _NUMBERS}
    values |= {name: fields.integer(name, 0, _LARGEST_SEED) for name in _INTEGERS}
    try:
        return SamplingParams(**given, **{name: value for name, value in values.items() if value is not None})
    except ValueError as error:
        # Its message begins with the field's name.
        raise ApiError(400, str(error), str(error).split()[0]) from None


def _max_tokens(fields: Fields, chat: bool) -> int | None:
    asked = fields.integer("max_tokens", 1, _LARGEST_SEED)
    if not chat:
        return _COMPLETION_TOKENS if asked is None else asked
    return fields.integer("max_completion_tokens", 1, _LARGEST_SEED, asked)


def _logprobs(fields: Fields, chat: bool) -> tuple[bool, int]:
    """Whether log-probabilities are asked for, and of how many of the most likely tokens at each position.

    A chat has a field for either, a completion one for both.
    """
    if not chat:
        number = fields.integer("logprobs", 0, _MOST_OF_COMPLETION)
        return number is not None, number or 0
    wanted, number = fields.flag("logprobs"), fields.integer("top_logprobs", 0, _MOST_OF_CHAT)
    if number and not wanted:
        raise ApiError(400, "top_logprobs needs log-probabilities: send logprobs as true, too", "top_logprobs")
    return wanted, number or 0


def _prompts(fields: Fields) -> list[Prompt]:
    value = fields.body.get("prompt")
    whole = isinstance(value, str) or (isinstance(value, list) and value and all(type(one) is int for one in value))
    prompts = [value] if whole else value
    if not isinstance(prompts, list) or not prompts or not all(_is_prompt(one) for one in prompts):
        raise ApiError(400, "prompt must be text, a list of token ids, or a list of one of these", "prompt")
    return prompts


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(one) is int for one in value))


def _messages(fields: Fields) -> list[dict[str, str]]:
    value = fields.body.get("messages")
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages must be a list with at least one message", "messages")
    return [_message(one) for one in value]


def _message(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise ApiError(400, "a message must be an object with a role and a content", "messages")
    if value.get("tool_calls") or value.get("function_call"):
        raise ApiError(400, "messages with tool calls are not supported: leave them out", "messages")
    content = value.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise ApiError(400, "the content of a message must be text, or a list of parts of type text", "messages")
    return {"role": value["role"], "content": content}
