"""The fields of a request's body, checked one by one; an error names its field."""

from collections.abc import Callable, Mapping
from typing import Any

from decoder.serve.errors import ApiError

_MOST_STOPS = 16
_LONGEST_STOP = 1000

# Fields that would change the text, which nothing here reads, with the values that stand for their absence.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "typical_p": (1, 1.0),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "truncate_prompt_tokens": (),
}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise a 400 for a field that would change the text and is not supported."""
    for name, harmless in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise ApiError(400, f"{name} is not supported here and would change the text: leave it out", name)


class Fields:
    """Reads fields of a body, which is checked to be a JSON object; null stands for a field that is not there."""

    def __init__(self, body: Any):
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        self.body = body

    def _read(self, name: str, fits: Callable[[Any], bool], words: str, default: Any) -> Any:
        value = self.body.get(name)
        if value is None:
            return default
        if not fits(value):
            raise ApiError(400, f"{name} must be {words}", name)
        return value

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int | None:
        words = f"an integer of at least {least:,} and at most {most:,}"
        return self._read(name, lambda value: type(value) is int and least <= value <= most, words, default)

    def flag(self, name: str, default: bool = False) -> bool:
        return self._read(name, lambda value: isinstance(value, bool), "true or false", default)

    def text(self, name: str) -> str | None:
        return self._read(name, lambda value: isinstance(value, str), "text", None)

    def number(self, name: str) -> float | None:
        """A number, whose range `SamplingParams` checks."""
        fits = lambda value: isinstance(value, int | float) and not isinstance(value, bool)  # noqa: E731
        return self._read(name, fits, "a number", None)

    def stops(self) -> list[str]:
        """The strings at which the text ends."""
        value = self.body.get("stop")
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if (
            not isinstance(listed, list)
            or len(listed) > _MOST_STOPS
            or not all(isinstance(one, str) and 0 < len(one) <= _LONGEST_STOP for one in listed)
        ):
            words = f"text of 1 to {_LONGEST_STOP:,} characters, or a list of at most {_MOST_STOPS} of these"
            raise ApiError(400, f"stop must be {words}", "stop")
        return listed
