"""TriForce* (arXiv 2404.11912; paper, Table 3): drafting in two stages.

A small model drafts for the target over a partial cache, and that drafts for the target over the full cache.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from decoder.backends.base import PassOutput
from decoder.cache.full import FullCache
from decoder.cache.partial import PartialCache
from decoder.cache.streaming import RecentCache
from decoder.drafters.base import Drafter, DrafterContext
from decoder.model.vocabularies import known
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.stats import Statistics
from decoder.work import Progress, Work

_CHUNK = 64  # tokens of the sequence that the small model reads in a pass


class TriForce(Drafter):
    """Drafts a chain as deep as ``options.tree``, chosen by the target over its partial cache.

    That chain is drafted in turn, in rounds. In each round a small model with a StreamingLLM cache guesses the tokens
    that are missing. One pass of the target over the partial cache then accepts the guesses as far as they equal its
    own choices, and adds one choice more. The partial cache follows the sequence as TokenSwift's does. The star stands
    for this: the original selects the cache once.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = ()
    needs_heads: ClassVar[bool] = False
    observed_queries = 1  # the importance of an entry is for the newest token

    def __init__(self, context: DrafterContext) -> None:
        if context.draft_model is None:
            raise ValueError("method 'triforce' needs a small model with the same vocabulary: give draft_model=")
        positions = context.draft_model.model.config.max_position_embeddings
        if positions < context.longest_text:
            raise ValueError(
                f"the draft model has {positions} positions, fewer than the {context.longest_text} of prompt + "
                f"max_new_tokens: shorten them, or take another one"
            )
        self.target, self.small, self.options = context.target, context.draft_model, context.options
        self.count = min(self.options.depth, context.max_new_tokens)
        self.max_nodes = 1 + self.count
        self.prompt = context.prompt
        budget, sink = context.budget, self.options.sink
        self.partial = PartialCache(budget, sink, dynamic=self.options.cache != "static", room=self.count)
        self.recent = RecentCache(context.draft_budget, sink, room=max(_CHUNK, self.count))
        self.read: list[int] = []  # drafted tokens whose entries are in `recent`, behind those of the sequence

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> Work[None]:
        if cache.length:
            self.partial.append(cache, queries)
        yield from self.small.refreshing()
        prompt = self.prompt[:-1]
        for start in range(0, len(prompt), _CHUNK):
            chunk = prompt[start : start + _CHUNK]
            with self.small.patched():
                self._read_text(chunk)
            yield Progress(len(chunk), len(prompt) - start - len(chunk))

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        tree = TokenTree(sampler.context[-1])
        chain: list[int] = []
        count = min(self.count, depth)
        with self.small.patched():
            while len(chain) < count:
                guesses = self._guess(sampler, chain, count - len(chain) - 1)
                self.partial.hold(len(chain))
                newest = chain[-1] if chain else tree.tokens[0]
                hidden = self.target.draft([newest, *guesses], cache.length + len(chain), self.partial)
                logits = self.target.head(self.target.norm(hidden))
                for row, guess in zip(logits, [*guesses, None], strict=True):
                    chain.append(self._choice(sampler, row, chain))
                    if chain[-1] != guess:
                        break
        tree.add_path(chain, "target")
        return tree

    def _guess(self, sampler: Sampler, chain: list[int], count: int) -> list[int]:
        """The ``count`` tokens that the small model expects after ``chain``; it reads what it has not read first."""
        if not count:
            return []
        if chain:
            agreed = 0
            while agreed < len(chain) - 1 and self.read[agreed : agreed + 1] == chain[agreed : agreed + 1]:
                agreed += 1
            self.read = self.read[:agreed]
            hidden = self._read_ahead(chain[agreed:])
        else:
            hidden = self._read_text(sampler.context[self.recent.seen :])
        guesses: list[int] = []
        while True:
            logits = self.small.head(self.small.norm(hidden[-1]))
            guesses.append(self._choice(sampler, logits, [*chain, *guesses]))
            if len(guesses) == count:
                return guesses
            hidden = self._read_ahead(guesses[-1:])

    def _choice(self, sampler: Sampler, logits: torch.Tensor, drafted: list[int]) -> int:
        """The best candidate behind ``drafted``, the same for all processes that share the target."""
        context = sampler.draft_context(drafted)
        return self.target.ranks.first(lambda: int(sampler.draft_choice(logits, self.options.coupled, context)))

    def _read_text(self, tokens: list[int]) -> torch.Tensor | None:
        """Let the small model read committed tokens; returns the hidden states of the last chunk."""
        self.read, hidden = [], None
        self.recent.hold(0)
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            hidden = self.small.draft(known(chunk, self.small.vocab_size), self.recent.seen, self.recent)
            self.recent.commit(len(chunk))
        return hidden

    def _read_ahead(self, tokens: list[int]) -> torch.Tensor:
        """Let the small model read drafted tokens behind those in ``self.read``; returns their hidden states."""
        self.recent.hold(len(self.read))
        tokens_known = known(tokens, self.small.vocab_size)
        hidden = self.small.draft(tokens_known, self.recent.seen + len(self.read), self.recent)
        self.read += tokens
        return hidden

    def commit(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        self.partial.append(cache, verification.queries, path[-1])

    def finish(self, statistics: Statistics) -> None:
        statistics.cache_rebuilds += self.partial.rebuilds
