"""Prompts as token ids: text through the tokenizer, chat messages through its chat template."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoder.checks import check, shown
from decoder.text.roles import with_known_roles

Prompt = str | Sequence[int] | torch.Tensor | Sequence[Mapping[str, Any]]


def prompt_ids(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    sanitize_control_tokens: bool = False,
    **template_kwargs: Any,
) -> list[int]:
    """The token ids of a prompt in any of its forms.

    Args:
        sanitize_control_tokens: whether control tokens in the messages of a chat are text.
        template_kwargs: what the template of a chat is given, such as ``tools``.

    Raises:
        ValueError: the prompt has another form, is empty, has ids outside the vocabulary, or needs a tokenizer when
            there is none.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: give the Decoder one, or give token ids")
        ids = text_ids(prompt, tokenizer)
    elif is_chat(prompt):
        ids = chat_ids(prompt, tokenizer, sanitize_control_tokens, **template_kwargs)
    elif isinstance(prompt, torch.Tensor):
        no_ids = prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool
        if no_ids or prompt.ndim not in (1, 2):
            raise ValueError("a prompt tensor holds integer token ids, of shape [n] or [1, n]")
        if prompt.ndim == 2 and len(prompt) != 1:
            raise ValueError(f"one prompt at a time: the batch has {len(prompt)}; generate_batch takes many")
        ids = prompt.flatten().tolist()
    elif isinstance(prompt, Sequence) and all(type(i) is int for i in prompt) and not isinstance(prompt, bytes):
        ids = [i for i in prompt if isinstance(i, int)]
    else:
        raise ValueError("a prompt is text, chat messages, a list of integer token ids, or a LongTensor [n] or [1, n]")
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {shown(outside)} is outside the vocabulary of {vocab_size}")
    return ids


def is_chat(prompt: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a prompt is a list of messages, as opposed to text or token ids."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return listed and len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text. Raises ValueError when it is not Unicode."""
    check(text, "the prompt")
    # Not verbose, to avoid a warning of the length, which `check_arguments` compares with the model's limit.
    return tokenizer(text, verbose=False)["input_ids"]


def chat_ids(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    sanitize_control_tokens: bool = False,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of a chat, up to where the assistant's answer begins.

    Args:
        messages: ``{"role": ..., "content": ...}`` each, the oldest first. The role ``developer`` is taken for
            ``system`` where the template does not know it.
        sanitize_control_tokens: whether control tokens in the messages are text, as in transformers; otherwise they
            are what the template's own are, so that a text can end its turn and begin another one.
        template_kwargs: what else the template is given, such as ``tools``.

    Raises:
        ValueError: no tokenizer, one without a chat template, messages that its template does not take, a role that it
            does not know, or control tokens cannot be made text with this tokenizer.
    """
    if tokenizer is None:
        raise ValueError("chat messages need a tokenizer: give the Decoder one, or give token ids")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template, as those of base models: give the prompt as text")
    if any(not isinstance(message.get(key), str) for message in messages for key in ("role", "content")):
        raise ValueError('a chat message is {"role": ..., "content": ...}, both of them text')
    check({"messages": list(messages)}, "the prompt")
    if sanitize_control_tokens:
        check_sanitizes(tokenizer)
    # Older releases would take it for a variable of the template.
    sanitizing = {"sanitize_control_tokens": True} if sanitize_control_tokens else {}
    try:
        template = tokenizer.get_chat_template()
        chat = with_known_roles(messages, template, tokenizer)
        for index, message in enumerate(chat):
            if message.get("tool_calls") and "tool_calls" not in template:
                raise ValueError(f"messages[{index}].tool_calls: the chat template passes on no calls: leave them out")
        return tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False, **sanitizing, **template_kwargs
        )
    except TemplateError as error:
        raise ValueError(f"the tokenizer's chat template does not take these messages: {error}") from error


def check_sanitizes(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError unless a tokenizer's chats can have control tokens as text."""
    if "sanitize_control_tokens" not in inspect.signature(tokenizer.apply_chat_template).parameters:
        raise ValueError(
            "control tokens in chats cannot be made text here: install transformers 5.20 or newer, or leave out "
            "sanitize_control_tokens"
        )
