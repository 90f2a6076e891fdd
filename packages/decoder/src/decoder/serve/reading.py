"""Requests are read aside, in threads: their JSON and their prompts' tokens, small ones never behind a large one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from decoder.serve.errors import stopping
from decoder.text.prompts import Prompt, is_chat, text_ids

T = TypeVar("T")

_SMALL = 2**14  # characters, bytes or token ids that are read in some hundredths of a second
_CHARACTERS = 8  # of a token, at most, in nearly all texts
_SURELY = 1.25  # times the positions: a text whose beginning has so many tokens has too many


class Reading:
    """Threads that read requests: one what is small, one what is large, and one that compiles grammars.

    Args:
        tokenizer: which both threads use, and only they may encode with.
        sanitize_control_tokens: whether control tokens in chats are text.
        own_threads: whether there are those threads; else all is read in the caller's, and nothing waits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sanitize_control_tokens: bool, own_threads: bool = True):
        # The first text switches off what the tokenizer's file may ask for, such as truncation. After that only
        # sanitizing changes a tokenizer in Rust, which another thread must not use meanwhile.
        tokenizer("a")
        shared = tokenizer.is_fast and not sanitize_control_tokens
        self._small = ThreadPoolExecutor(1, thread_name_prefix="small"), tokenizer
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large"), tokenizer if shared else deepcopy(tokenizer)
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammars"), tokenizer
        self._own_threads = own_threads
        self._begun: set[Future] = set()
        self._awaited: set[asyncio.Future] = set()
        self._stopped = False

    async def read(self, size: int, work: Callable[[PreTrainedTokenizerBase], T]) -> T:
        """The result of ``work``, which has about ``size`` characters to read; raises ApiError 503 after `stop`."""
        return await self._done_by(*(self._small if size <= _SMALL else self._large), work)

    async def compile(self, work: Callable[[PreTrainedTokenizerBase], T]) -> T:
        """The same in a thread for grammars, of which even small ones can take a second."""
        return await self._done_by(*self._grammars, work)

    async def _done_by(
        self, threads: ThreadPoolExecutor, tokenizer: PreTrainedTokenizerBase, work: Callable[..., T]
    ) -> T:
        if self._stopped:
            raise stopping()
        if not self._own_threads:
            return work(tokenizer)
        begun = threads.submit(work, tokenizer)
        self._begun.add(begun)
        begun.add_done_callback(self._begun.discard)
        awaited = asyncio.wrap_future(begun)
        self._awaited.add(awaited)
        try:
            return await awaited
        except asyncio.CancelledError:
            if self._stopped:
                raise stopping() from None
            raise
        finally:
            self._awaited.discard(awaited)

    def stop(self) -> None:
        """Read no more; what is being read is given up, as no text could begin any more."""
        self._stopped = True
        for awaited in list(self._awaited):
            awaited.cancel()

    @property
    def busy(self) -> bool:
        """Whether a thread still reads, for whomever: it cannot be interrupted."""
        return bool(self._begun)


def size_of(prompt: Prompt) -> int:
    """How many characters or token ids a prompt has."""
    if is_chat(prompt):
        each = (one for message in prompt for one in message.values())
        return sum(len(one) if isinstance(one, str) else len(str(one)) for one in each)
    return len(prompt)


def surely_too_long(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, positions: int) -> bool:
    """Whether a prompt's text is seen from its beginning to have more tokens than ``positions``.

    Reading megabytes to their end takes many seconds, in which others wait.
    """
    texts = [prompt] if isinstance(prompt, str) else [one["content"] for one in prompt] if is_chat(prompt) else []
    most = _CHARACTERS * positions
    return any(len(text) > 2 * most and len(text_ids(text[:most], tokenizer)) > _SURELY * positions for text in texts)
