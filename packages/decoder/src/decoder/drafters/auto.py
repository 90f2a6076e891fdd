"""The default method: drafts from suffixes and heads in each step where they pay, plain decoding where they do not."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from decoder.backends.base import PassOutput
from decoder.cache.full import FullCache
from decoder.draft_heads import KINDS
from decoder.drafters.base import DrafterContext
from decoder.drafters.retrieval.suffix_index import SuffixIndex
from decoder.drafters.retrieval.taking_in import taking_in
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.work import Work

_LONGEST = 32  # tokens of a suffix, and of a chain behind it


class Auto(CostTuned):
    """Cost-tuned trees from the text's own suffixes, and from draft heads and a draft model where there are any.

    A suffix of the text tells what followed it where it stood before (compare SuffixDecoding, arXiv 2411.04975).
    """

    heads_kinds: ClassVar[tuple[str, ...]] = ("eagle3", "dflash", "assistant", "mtp", *KINDS)
    takes_draft_model: ClassVar[bool] = True

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.index = SuffixIndex(_LONGEST)

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> Work[None]:
        yield from taking_in(self.index, self.context.prompt)
        yield from super().start(cache, queries) or ()

    def _offer_before_levels(self) -> None:
        """The chain that most often followed the longest suffix seen before, and what else followed on its way."""
        node, (length, occurrences) = 0, self.index.match()
        for level in self.index.continuations(occurrences, _LONGEST):
            nodes = []
            for token, share in level:
                kind = "suffix", min(length, _LONGEST).bit_length(), int(5 * share)
                # The longer the suffix, the likelier: 1 to 1 behind one token that was followed once.
                prior = share * (length + 1) / (2 + share * (length - 1))
                nodes.append(self._candidates.offer(node, token, kind, prior))
            if (node := nodes[0]) is None:
                return
            length += 1

    def _take_in(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        self.index.extend(tokens)


class Suffix(Auto):
    """Cost-tuned trees from prompt and output alone; costs no pass over any weights."""

    heads_kinds: ClassVar[tuple[str, ...]] = ()
    takes_draft_model: ClassVar[bool] = False
