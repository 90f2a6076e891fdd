"""One generation: the step that reads as the pipeline, and the loop around it."""

import time
from collections.abc import Callable
from functools import partial

import torch

from decoder.cache.full import FullCache
from decoder.drafters import Drafter, LooksAhead
from decoder.model.target import Target, Verification
from decoder.sampling.acceptance import Acceptance, Ending, Question, exact
from decoder.sampling.sampler import Sampler
from decoder.stats import Statistics


class Engine:
    """Decodes one prompt with any drafter; accepted exactly, the text depends on target and sampler alone.

    All committed tokens but the newest are in the full cache; the newest is the root of the next tree.

    Args:
        target: the model.
        drafter: proposes the tree of each step.
        sampler: holds the text so far, the prompt, and chooses its continuation.
        max_new_tokens: exact number of tokens, unless ``ends`` says so before.
        open_ended: ``max_new_tokens`` is a bound that is hardly reached, so the full cache starts small and grows.
        ends: called with every chosen token; True ends the text with it.
        accept: the rule by which a verified tree gives tokens.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        sampler: Sampler,
        max_new_tokens: int,
        ends: Callable[[int], bool],
        accept: Acceptance = exact,
        open_ended: bool = False,
    ):
        self.target, self.drafter, self.sampler, self.ends, self.accept = target, drafter, sampler, ends, accept
        self.remaining = max_new_tokens
        self._looks_ahead = isinstance(drafter, LooksAhead)
        self.statistics = Statistics()
        self.finish_reason: str | None = None if max_new_tokens else "length"
        start = len(sampler.context) + target.width(drafter.max_nodes)
        self.cache = FullCache(start if open_ended else start + max_new_tokens, growable=open_ended)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Commit the prompt but its last token."""
        start = time.perf_counter()
        self.target.look_again()
        with self.target.borrowed():
            queries = self.target.prefill(self.sampler.context[:-1], self.cache)
            self.drafter.start(self.cache, queries)
        self.target.wait()
        self.statistics.prefill_seconds = time.perf_counter() - start

    @torch.inference_mode()
    def step(self) -> list[int]:
        """Draft, verify, accept, commit: the next one or more tokens."""
        start = time.perf_counter()
        with self.target.borrowed():
            # One more token than is accepted comes anyway, and no position beyond the last one may be looked at.
            tree = self.drafter.propose(self.cache, self.sampler, self.remaining - 1)
            tree.prune(self.remaining - 1)
            verification = self.target.forward(tree, self.cache)
        look_ahead = partial(self._look_ahead, verification) if self._looks_ahead else None
        path, tokens = self.accept(tree, verification.logits, self.sampler, self._took, look_ahead)
        self.cache.keep(path)
        self.drafter.commit(self.cache, verification, path, tokens)
        self.statistics.count_step(tree.depth, [tree.sources[node] for node in path[1:]], len(tokens))
        # The tokens have come from the device, so no more waiting is needed to know the time.
        self.statistics.decode_seconds += time.perf_counter() - start
        if self.finish_reason:
            self.drafter.finish(self.statistics)
        return tokens

    def _look_ahead(self, verification: Verification, ending: Ending) -> Question | None:
        with self.target.borrowed():
            return self.drafter.look_ahead(verification, self.sampler, ending)

    def _took(self, token: int) -> bool:
        """Count a new token; True when it is the last one."""
        self.remaining -= 1
        if self.ends(token):
            self.finish_reason = "stop"
        elif not self.remaining:
            self.finish_reason = "length"
        return self.finish_reason is not None
