"""A sequence: all that belongs to one text while it is generated."""

from collections.abc import Collection

from decoder.cache.full import FullCache
from decoder.drafters.base import Drafter
from decoder.outputs import Chunk, GenerationOutput, Request
from decoder.sampling.acceptance import AcceptanceRule, exact
from decoder.sampling.sampler import Sampler
from decoder.stats import Statistics
from decoder.text.stream import TextStream


class Sequence:
    """One text: its tokens and sampling state, its caches, its drafter's state, its stops, text stream and statistics.

    All committed tokens but the newest are in the full cache; the newest is the root of the next tree.

    Args:
        request: what the text was asked for.
        sampler: holds the text so far, the prompt, and chooses its continuation.
        drafter: proposes the tree of each step.
        cache: for all committed tokens.
        max_new_tokens: exact number of tokens, unless a stop ends the text before.
        stop_ids: tokens that end the text.
        text: turns tokens into text and finds stop strings; None without a tokenizer.
        rule: by which a verified tree gives tokens.
        draws_whole_trees: draw the tokens of all nodes on the device at once; else those of visited nodes, one by one.

    Attributes:
        finish_reason: "length" or "stop" once the text has ended.
        error: what ended it where that was neither; `Engine.step` leaves it here.
    """

    def __init__(
        self,
        request: Request,
        sampler: Sampler,
        drafter: Drafter,
        cache: FullCache,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        text: TextStream | None = None,
        rule: AcceptanceRule = exact,
        draws_whole_trees: bool = False,
    ):
        self.request, self.sampler, self.drafter, self.cache = request, sampler, drafter, cache
        self.remaining, self.stop_ids, self.text = max_new_tokens, stop_ids, text
        self.rule, self.draws_whole_trees = rule, draws_whole_trees
        self.statistics = Statistics()
        self.finish_reason: str | None = None if max_new_tokens else "length"
        self.error: Exception | None = None

    @property
    def token_ids(self) -> list[int]:
        """The new tokens so far."""
        return self.sampler.context[len(self.request.prompt_ids) :]

    @property
    def done(self) -> bool:
        """Whether no step is to follow."""
        return self.finish_reason is not None or self.error is not None

    def took(self, token: int) -> bool:
        """Count a token that was appended to the text; True when it is the last one."""
        self.remaining -= 1
        if self.text is not None:
            self.text.push(token)
        if token in self.stop_ids or (self.text is not None and self.text.stopped):
            self.finish_reason = "stop"
        elif not self.remaining:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def chunk(self, tokens: list[int]) -> Chunk:
        """What a step that added ``tokens`` gives to a stream."""
        done = self.finish_reason is not None
        piece = "" if self.text is None else self.text.take(final=done)
        if done and self.text is not None and self.text.stopped:
            # Text that waited for its end may complete a stop string with it.
            self.finish_reason = "stop"
        return Chunk(tokens, piece, self.statistics, self.output() if done else None)

    def output(self) -> GenerationOutput:
        """The finished generation."""
        return GenerationOutput(
            token_ids=self.token_ids,
            text="" if self.text is None else self.text.text,
            finish_reason=self.finish_reason,
            stats=self.statistics,
            request=self.request,
            logprobs=self.sampler.logprobs,
        )
