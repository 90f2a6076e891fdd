"""What is asked of `/tokenize` and `/detokenize`."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoder.serve.errors import ApiError
from decoder.serve.fields import DETOKENIZE, TOKENIZE, read_body
from decoder.serve.messages import messages_of
from decoder.serve.requests import template_kwargs_of
from decoder.text.prompts import chat_ids


@dataclass(frozen=True)
class Tokenize:
    """What is to become tokens.

    Attributes:
        text: None for a chat.
        messages: of a chat.
        template_kwargs: what its template is given.
        add_special_tokens: whether the tokenizer puts its own around a text; None for as in completions.
        with_pieces: whether the tokens come as texts, too.
    """

    text: str | None
    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    add_special_tokens: bool | None
    with_pieces: bool

    def ids(self, tokenizer: PreTrainedTokenizerBase, sanitize_control_tokens: bool) -> list[int]:
        """The token ids. Raises ValueError as `chat_ids`."""
        if self.text is None:
            return chat_ids(self.messages, tokenizer, sanitize_control_tokens, **self.template_kwargs)
        special = {} if self.add_special_tokens is None else {"add_special_tokens": self.add_special_tokens}
        return tokenizer(self.text, verbose=False, **special)["input_ids"]


def read_tokenize(body: Any) -> Tokenize:
    """What a body asks for; raises ApiError 400."""
    values = read_body(body, TOKENIZE)
    text = values["content"] if values["prompt"] is None else values["prompt"]
    if (text is None) == (values["messages"] is None):
        raise ApiError(400, "send one of prompt, content and messages", "prompt")
    kwargs = template_kwargs_of(values)
    if values["tools"]:
        kwargs["tools"] = values["tools"]
    special = values["add_special"] if values["add_special_tokens"] is None else values["add_special_tokens"]
    messages = [] if values["messages"] is None else messages_of(values["messages"])
    return Tokenize(text, messages, kwargs, special, values["return_token_strs"] or values["with_pieces"])


def read_detokenize(body: Any) -> list[int]:
    """The token ids of a body; raises ApiError 400."""
    return read_body(body, DETOKENIZE)["tokens"]
