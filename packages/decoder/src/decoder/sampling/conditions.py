"""What the choice of a token depends on beside the logits: which tokens may follow, and which are penalised."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from decoder.constraints.base import Vocabulary
from decoder.sampling.constraint_path import ConstraintNode, ConstraintPath
from decoder.sampling.params import SamplingParams


class Conditions(NamedTuple):
    """Those of one position or of several; None where nothing is to be done.

    Attributes:
        in_window: the tokens of the penalty window, bool [..., V].
        counts: how often the output has each token, int32 [..., V].
        allowed: the tokens that may follow, bool [..., V].
    """

    in_window: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    allowed: torch.Tensor | None = None

    def of_tokens(self, token_ids: torch.Tensor) -> "Conditions":
        """Those of some tokens alone, whose ids [v] are given."""
        return Conditions(*(None if one is None else one.index_select(-1, token_ids) for one in self))


class Restriction:
    """Which tokens may follow in one text, by constraint, bad words and min_tokens.

    Args:
        vocabulary: that of the text; its logits are on ``device``.
        prompt_tokens: how many tokens of the text the output does not have.

    Attributes:
        path: where the text stands in its constraint; None without one.

    Raises:
        ValueError: what the parameters name does not fit the vocabulary.
    """

    def __init__(self, params: SamplingParams, vocabulary: Vocabulary, device: torch.device, output: Sequence[int]):
        self._vocabulary, self._device, self._min_tokens = vocabulary, device, params.min_tokens
        self._bad_words = list(_bad_word_ids(params.bad_words, vocabulary))
        self.path: ConstraintPath | None = None
        if params.constraint is not None:
            self.path = ConstraintPath(params.constraint.start(vocabulary), vocabulary, output)

    def allowed(self, output: Sequence[int], node: ConstraintNode | None = None) -> torch.Tensor | None:
        """The tokens that may follow an output, bool [V] on the device; None where all may.

        ``node`` is where the output stands in the constraint; None where that is not known, or there is no constraint.
        """
        mask = None if self.path is None or node is None else self.path.mask(node)
        banned = self._banned(output, mask)
        if banned:
            # NumPy, as for all rows on the host, see `host_rows`.
            left = np.ones(self._vocabulary.size, np.bool_) if mask is None else mask.numpy(force=True).copy()
            left[banned] = False
            mask = torch.from_numpy(left)
        return None if mask is None else mask.to(self._device)

    def _banned(self, output: Sequence[int], mask: torch.Tensor | None) -> list[int]:
        banned = []
        for *before, last in self._bad_words:
            if not before or list(output[-len(before) :]) == before:
                banned.append(last)
        if len(output) < self._min_tokens:
            ends = list(self._vocabulary.stop_ids)
            # Where the constraint leaves nothing but an end, the text ends early.
            left = None if mask is None else mask.numpy(force=True)
            if left is None or np.count_nonzero(left[ends]) < np.count_nonzero(left):
                banned += ends
        return banned


def _bad_word_ids(words: Sequence[str | Sequence[int]], vocabulary: Vocabulary) -> Iterator[list[int]]:
    """The token ids of bad words: a text's, and those with a space in front where that makes another first token."""
    for word in words:
        if isinstance(word, str):
            if vocabulary.tokenizer is None:
                raise ValueError("bad_words that are texts need a tokenizer: give the Decoder one, or their token ids")
            yield from _forms(word, vocabulary.tokenizer)
            continue
        outside = next((token for token in word if token >= vocabulary.size), None)
        if outside is not None:
            raise ValueError(f"bad_words has {outside}, which is outside the vocabulary of {vocabulary.size}")
        yield list(word)


def _forms(word: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    plain, spaced = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
    yield plain
    # As in vLLM: of more tokens, the space is one of its own, and the word behind it is ruled out already.
    if spaced[0] != plain[0] and len(spaced) == len(plain):
        yield spaced
