"""Prompts of text and of chat messages as token ids; chats through the tokenizer's own chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, as opposed to text or token ids."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return listed and len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text. Raises ValueError when it is not Unicode."""
    _refuse_surrogates(text)
    # No length warning: the length is checked against the model, in words, right after.
    return tokenizer(text, verbose=False)["input_ids"]


def chat_ids(messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Token ids of a chat, up to where the assistant's answer begins.

    Args:
        messages: ``{"role": ..., "content": ...}`` each, the oldest first.

    Raises:
        ValueError: no tokenizer, one without a chat template, or messages that its template does not take.
    """
    if tokenizer is None:
        raise ValueError("chat messages need a tokenizer: give the Decoder one, or give token ids")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template, as those of base models: give the prompt as text")
    if any(not isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
        raise ValueError('a chat message is {"role": ..., "content": ...}, both of them text')
    for message in messages:
        _refuse_surrogates(message["content"])
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise ValueError(f"the tokenizer's chat template does not take these messages: {error}") from error


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start + 1} is the lone surrogate {text[error.start]!a}"
        raise ValueError(f"the prompt is not valid Unicode: {where}") from None
