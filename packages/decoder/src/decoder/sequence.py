"""A sequence: everything that belongs to one text while it is generated."""

from collections.abc import Callable, Collection
from typing import TypeVar

from decoder.cache.full import FullCache
from decoder.drafters.base import Drafter, WantsLevels, WorksBetweenSteps
from decoder.drafters.tuning.verify_costs import WIDEST
from decoder.outputs import Chunk, GenerationOutput, Request
from decoder.prompt_scores import PromptScores
from decoder.sampling.acceptance import AcceptanceRule, exact
from decoder.sampling.sampler import Sampler
from decoder.stats import Statistics
from decoder.text.stream import TextStream

T = TypeVar("T")

Renew = Callable[[list[int], int], tuple[Drafter, FullCache]]
"""Makes the drafter and the empty cache of a text: its tokens so far, and how many may yet be generated."""


def most_nodes(drafter: Drafter, sampler: Sampler) -> int:
    """How many nodes the trees of a text have at most.

    A constraint adds the tokens that follow in any case, which may be more than a drafter's own; not in plain decoding,
    which drafts nothing.
    """
    return drafter.max_nodes if sampler.constraint is None or drafter.max_nodes == 1 else max(drafter.max_nodes, WIDEST)


class Sequence:
    """One text: its tokens and sampling state, its caches, its drafter's state, its stops, text stream and statistics.

    All committed tokens but the newest are in the full cache; the newest is the root of the next tree.

    Args:
        request: the model, prompt and sampling settings, as `GenerationOutput` reports them.
        sampler: holds the tokens so far, at first the prompt's, and draws those that follow.
        drafter: proposes the tree of each step.
        cache: holds keys and values of the committed tokens.
        max_new_tokens: how many tokens to generate, exactly, unless a stop ends the text earlier.
        stop_ids: tokens that end the text.
        text_stream: turns tokens into text and finds stop strings; None without a tokenizer.
        rule: chooses the accepted path of a verified tree.
        draws_whole_trees: whether the tokens of all nodes are drawn on the device at once. Otherwise ``rule`` draws
            them one by one, at the nodes that the walk visits.
        renew: for a text that may be preempted; see `preempt`.
        prompt_scores: collects log-probabilities of the prompt, if they are asked for.

    Attributes:
        remaining: how many tokens may still be generated.
        planned_positions: how many positions were planned for its cache when it was preempted. At least as many are
            planned when it joins again, so that it does not join just to be preempted again.
        wants_levels, long_work: the drafter's methods of `WantsLevels` and `WorksBetweenSteps`; None if it has none.
        finish_reason: "length" or "stop" once the text has ended.
        error: the exception that ended the text, if one did.
    """

    def __init__(
        self,
        request: Request,
        sampler: Sampler,
        drafter: Drafter,
        cache: FullCache,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        text_stream: TextStream | None = None,
        rule: AcceptanceRule = exact,
        draws_whole_trees: bool = False,
        renew: Renew | None = None,
        prompt_scores: PromptScores | None = None,
    ):
        self.prompt_scores = prompt_scores
        self.request, self.sampler, self.renew = request, sampler, renew
        self.remaining, self.stop_ids, self.text_stream = max_new_tokens, stop_ids, text_stream
        self.rule, self.draws_whole_trees = rule, draws_whole_trees
        self._take(drafter, cache)
        self.planned_positions = 0
        self.statistics = Statistics()
        # The prompt is read in any case where it is asked for.
        self.finish_reason: str | None = None if max_new_tokens or prompt_scores is not None else "length"
        self.error: Exception | None = None

    def _take(self, drafter: Drafter, cache: FullCache) -> None:
        self.drafter, self.cache = drafter, cache
        # Found once: to look for a protocol's members takes 4 to 7 microseconds.
        self.wants_levels = drafter.wants_levels if isinstance(drafter, WantsLevels) else None
        self.long_work = drafter.long_work if isinstance(drafter, WorksBetweenSteps) else None

    def preempt(self) -> None:
        """Give up the cache and the drafter, so that the tokens so far are prefilled when the text goes on."""
        assert self.renew is not None
        self.planned_positions = max(self.planned_positions, self.cache.next_capacity)
        self.drafter.finish(self.statistics)
        self._take(*self.renew(list(self.sampler.context), self.remaining))

    def end(self) -> None:
        """End the text here, as if no more tokens had been asked for."""
        self.drafter.finish(self.statistics)
        self.finish_reason = "length"

    @property
    def token_ids(self) -> list[int]:
        """The new tokens so far."""
        return self.sampler.context[len(self.request.prompt_ids) :]

    @property
    def most_nodes(self) -> int:
        """How many nodes its trees have at most."""
        return most_nodes(self.drafter, self.sampler)

    @property
    def done(self) -> bool:
        """Whether the text has ended, so that no step follows."""
        return self.finish_reason is not None or self.error is not None

    def advance(self, token: int) -> bool:
        """Count a token that the sampler has appended, and look for stops; returns whether the text ends with it."""
        self.remaining -= 1
        if self.text_stream is not None:
            self.text_stream.push(token)
        stopped = token in self.stop_ids or (self.text_stream is not None and self.text_stream.stopped)
        if stopped or self.sampler.finished:
            self.finish_reason = "stop"
        elif not self.remaining:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def chunk(self, tokens: list[int]) -> Chunk:
        """The `Chunk` that a step which added ``tokens`` gives to a stream."""
        done = self.finish_reason is not None
        piece = "" if self.text_stream is None else self.text_stream.take(final=done)
        if done and self.text_stream is not None and self.text_stream.stopped:
            # The text held back until now may have completed a stop string.
            self.finish_reason = "stop"
        return Chunk(
            token_ids=tokens,
            text=piece,
            stats=self.statistics,
            output=self.output() if done else None,
            logprobs=_last(self.sampler.logprobs, len(tokens)),
            top_logprobs=_last(self.sampler.top_logprobs, len(tokens)),
        )

    def output(self) -> GenerationOutput:
        """The finished generation."""
        return GenerationOutput(
            token_ids=self.token_ids,
            text="" if self.text_stream is None else self.text_stream.text,
            finish_reason=self.finish_reason,
            stats=self.statistics,
            request=self.request,
            logprobs=self.sampler.logprobs,
            top_logprobs=self.sampler.top_logprobs,
            prompt_logprobs=None if self.prompt_scores is None else self.prompt_scores.found,
        )


def _last(collected: list[T] | None, count: int) -> list[T] | None:
    """The last ``count`` of what was collected, if anything was."""
    return None if collected is None else collected[len(collected) - count :]
