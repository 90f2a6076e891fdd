"""Drafters that follow the text with keys and values of their own: EAGLE-3's, DFlash's and built-in ones."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from decoder.backends.base import PassOutput
from decoder.draft_heads import Drafting


class EntryShape(NamedTuple):
    """An entry's keys [kv_heads, key_dim] and values [kv_heads, value_dim]."""

    kv_heads: int
    key_dim: int
    value_dim: int


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Takes in the keys and values [n, kv_heads, D] of n entries, and returns the attention [n, heads, Dv] of their queries
[n, heads, D], whose products are scaled by the last argument. It is zero for entries that nothing is drafted behind."""


class DraftLayer(Drafting, ABC):
    """Decoder layers that keep entries of the text: keys and values, of what the model had computed at each position.

    The entry of position t + 1 may read the token there; the model's part of it is that of position t.

    Attributes:
        base_model: the model's name, as far as a checkpoint says it.
        sliding_window: how many entries of the text its attention sees; None sees all.
        target_layers: the layers of the model whose inputs it reads; None reads no such inputs.
        embed_tokens: embeddings of its own; None takes the model's.
        lm_head: a language-model head of its own, for its draft vocabulary; None takes the model's.
    """

    kind: ClassVar[str]
    config: Any
    conditioned: ClassVar[bool] = True
    base_model: str | None = None
    sliding_window: int | None = None
    target_layers: tuple[int, ...] | None = None
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    fc: nn.Linear
    """The layer that joins what an entry reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = self.lm_head = None

    @property
    def hidden_size(self) -> int:
        """Of the model that it is for."""
        return self.config.hidden_size

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """How many levels it was trained for; where it is conditioned, it serves any number."""

    def take_rotary(self, make: type[nn.Module], config: Any) -> None:
        """Make the embeddings of positions, which `angles` reads."""
        # In a tuple they are no submodule: their frequencies keep their precision when the weights are cast.
        with torch.device("cpu"):
            self._rotary = (make(config=config),)

    def angles(self, state: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions, int64 [1, n], in the dtype of ``state``."""
        return self._rotary[0](state, positions)

    def make_own_head(self) -> nn.Linear:
        """Give it a language-model head of its own, for its draft vocabulary."""
        self.lm_head = nn.Linear(self.config.hidden_size, self.draft_vocab_size or self.config.vocab_size, bias=False)
        return self.lm_head

    def make_own_embeddings(self) -> None:
        """Give it embeddings of its own."""
        self.embed_tokens = nn.Embedding(self.config.vocab_size, self.config.hidden_size)

    def set_draft_vocabulary(self, draft_to_target: torch.Tensor | None) -> None:
        """Draft only the tokens ``draft_to_target`` [v], or all (None). Raises ValueError unless these are ids."""
        if draft_to_target is not None:
            if draft_to_target.dtype != torch.int64 or draft_to_target.ndim != 1 or not len(draft_to_target):
                raise ValueError(f"the draft vocabulary{self._where} is no list of int64 token ids")
            if not 0 <= draft_to_target.min() <= draft_to_target.max() < self.config.vocab_size:
                raise ValueError(f"the draft vocabulary{self._where} is not of {self.config.vocab_size} tokens")
            if len(draft_to_target.unique()) != len(draft_to_target):
                raise ValueError(f"the draft vocabulary{self._where} names a token twice")
        self.draft_to_target = draft_to_target

    def check_fits(self, hidden_size: int, vocab_size: int | None = None, layers: int | None = None) -> None:
        """Raise ValueError unless it is for a model of that hidden size, vocabulary and number of layers."""
        which, own = f"the draft model{self._where}", self.config.vocab_size
        if hidden_size != self.hidden_size:
            raise ValueError(
                f"{which} is for hidden size {self.hidden_size}, the model has {hidden_size}: give a draft model of "
                "this model"
            )
        if vocab_size not in (None, own):
            raise ValueError(f"{which} is for {own} tokens, the model has {vocab_size}: give one of this model")
        if layers is not None and (highest := max(self.target_layers or (0,))) > layers:
            raise ValueError(f"{which} reads layer {highest}, the model has {layers} layers: give one of this model")

    @property
    @abstractmethod
    def entry_shape(self) -> EntryShape:
        """Of what is kept of each entry."""

    def features_of(self, seen: PassOutput) -> torch.Tensor:
        """What it reads of each token of a pass, [n, c]."""
        assert seen.features is not None  # the target returns them wherever layers of it are read
        return seen.features

    @abstractmethod
    def combine(self, features: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """The states [n, d] that ``features`` stand for; ``norm`` is the model's final one."""

    @abstractmethod
    def take_in(self, state: torch.Tensor, embedding: torch.Tensor, positions: torch.Tensor, attend: Attend) -> None:
        """Hand the keys and values of entries to ``attend``, and compute nothing else.

        Arguments are those of `RepeatedLayer.advance`.
        """


class RepeatedLayer(DraftLayer):
    """One decoder layer that drafts any number of levels.

    What comes out of the entry of position t + 1 predicts the token of position t + 2. The next level reads that
    prediction's token and what came out.
    """

    @property
    def state_size(self) -> int:
        """d, the size of its states."""
        return self.config.hidden_size

    @abstractmethod
    def advance(
        self,
        state: torch.Tensor,
        embedding: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        last: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out of entries: the next state, and the normalised one for the language-model head, [n, d].

        Args:
            state: [n, d].
            embedding: of the entries' tokens, [n, d].
            positions: int64 [n].
            attend: attention over what is kept, which also keeps these entries.
            last: which of the entries something is drafted behind, int64; None is all.
        """


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    scaling: float | None = None,
) -> torch.Tensor:
    """Attention [n, heads, Dv] of ``query`` [n, heads, D] to keys [kv_heads, length, D] and values.

    ``mask`` [n, length] is true where a query sees a key; None sees all. Products are scaled by D^-0.5, if nothing else
    is said.
    """
    count, heads, dim = query.shape
    groups = len(keys)
    rows = query.view(count, groups, heads // groups, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim)
    rows = rows * (dim**-0.5 if scaling is None else scaling)
    scores = torch.bmm(rows, keys.transpose(1, 2)).view(groups, heads // groups, count, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    output = torch.bmm(weights.view(groups, -1, keys.shape[1]), values)
    return output.view(groups, heads // groups, count, -1).permute(2, 0, 1, 3).reshape(count, heads, -1)
