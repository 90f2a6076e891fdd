"""All levels of draft heads in one call of the native library, for several sequences together."""

from collections.abc import Sequence
from ctypes import byref, c_double
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from decoder.backends.base import Forwards
from decoder.backends.memory import floats
from decoder.backends.native import library as native
from decoder.backends.native.packed_linear import PackedHead, PackedLinears, packed_by
from decoder.backends.native.packed_weight import NativeWeight
from decoder.backends.native.quantised import QuantisedEmbedding
from decoder.backends.native.structures import BF16, FP32, QUANTISED, Drafter, Drafts, Head, PackedWeight
from decoder.draft_heads import DraftHead, DraftHeads
from decoder.timings import stage

if TYPE_CHECKING:
    from decoder.drafters.draft_vocabulary import DraftVocabulary
    from decoder.drafters.levels import HeadLevels, LevelsWanted
    from decoder.model.target import Target

_DTYPES = (torch.float32, torch.bfloat16)


class NativeLevels:
    """Runs some heads; they hold the weights that were packed last.

    Args:
        packed: the heads in order, each with its module.
        vocabulary: the packed rows of the language-model head.
        ids: the tokens that these are for, int64 [v]; None is all.
        embeddings: of the model, [V, d], or packed as `embeddings_are` tells.
        embeddings_are: FP32, BF16, or QUANTISED and more by the place of their format.
        embedding_eps: of their norm.
        logit_scale: what logits are multiplied by.
    """

    def __init__(
        self,
        heads: DraftHeads,
        packed: Sequence[tuple[DraftHead, PackedHead]],
        vocabulary: NativeWeight,
        ids: torch.Tensor | None,
        embeddings: torch.Tensor,
        embeddings_are: int,
        embedding_eps: float,
        logit_scale: float,
    ):
        self._conditioned = heads.conditioned
        # Copies, as those of products are: a later change takes effect with the next generation.
        norms = [(_copy(head.input_norm.weight), _copy(head.output_norm.weight)) for head, _ in packed]
        ones = torch.ones(heads.hidden_size, dtype=torch.float32, device="cpu")
        ids = None if ids is None else ids.contiguous()
        products = [one.held for _, one in packed]
        self._held = products, norms, vocabulary, ids, embeddings, ones
        structures = [
            Head(
                _product(readers),
                _product(down),
                norm_in.data_ptr(),
                norm_out.data_ptr(),
                heads.norm_eps,
            )
            for (readers, down), (norm_in, norm_out) in zip(products, norms, strict=True)
        ]
        self._drafter = Drafter(
            heads=(Head * len(structures))(*structures),
            count=len(structures),
            size=heads.hidden_size,
            conditioned=heads.conditioned,
            chained=heads.chained,
            vocabulary_is_bf16=vocabulary.dtype == torch.bfloat16,
            embeddings_are=embeddings_are,
            embeddings=embeddings.data_ptr(),
            ones=ones.data_ptr(),
            embedding_eps=embedding_eps,
            logit_scale=logit_scale,
            vocabulary=vocabulary.product,
            ids=None if ids is None else ids.data_ptr(),
        )
        self._library, self._room = native.library(), floats(0)

    @stage("draft")
    def fill(self, wanted: Sequence["LevelsWanted"]) -> list[list[float]]:
        """What `Levels.read` takes of each; all of them have these heads, and an own level or none.

        Raises:
            MemoryError: there is no memory for it.
        """
        sequences = (Drafts * len(wanted))()
        held = []
        own = _own_levels(wanted) if wanted[0].own_level else [None] * len(wanted)
        for drafts, one, first in zip(sequences, wanted, own, strict=True):
            sampler, levels = one.sampler, _heads(one)
            penalised, counts = sampler.penalties()
            do_sample = levels.coupled and not sampler.params.greedy
            state = one.state if one.state.dtype in _DTYPES else one.state.float()
            out = (c_double * self._numbers(one))(*(first or ()))
            held.append((penalised, counts, state := state.contiguous(), out))
            drafts.choosing = sampler.native_drafts.choosing(do_sample, penalised, counts)
            drafts.position, drafts.newest = len(sampler.context), sampler.context[-1]
            drafts.state, drafts.state_is_bf16 = state.data_ptr(), state.dtype == torch.bfloat16
            drafts.given, drafts.levels, drafts.width, drafts.beam = (
                first is not None,
                one.count,
                levels.width,
                levels.beam,
            )
            drafts.out = native.address(out)
        branches, width = sum(_heads(one).beam for one in wanted), max(_heads(one).width for one in wanted)
        numbers = self._library.draft_numbers(byref(self._drafter), branches, width)
        if len(self._room) < numbers:
            self._room = floats(numbers)
        given = byref(self._drafter), sequences, len(wanted), self._room.data_ptr(), native.threads()
        if self._library.draft_levels(*given):
            raise MemoryError("no memory for the levels of draft heads")
        return [list(out) for *_, out in held]

    def _numbers(self, wanted: "LevelsWanted") -> int:
        """How many numbers the levels are."""
        width, beam = _heads(wanted).width, _heads(wanted).beam
        total, branches = 0, 1
        for level in range(wanted.count):
            if level and self._conditioned and beam > 1:
                branches = min(beam, branches * width)
                total += branches
            total += 2 * branches * width
        return total


def _heads(wanted: "LevelsWanted") -> "HeadLevels":
    return cast("HeadLevels", wanted.levels)


def _copy(weight: torch.Tensor) -> torch.Tensor:
    return floats(*weight.shape).copy_(weight.detach())


def _product(weight: NativeWeight | None) -> PackedWeight:
    """What the library reads; without inputs where there is no such product."""
    return PackedWeight() if weight is None else weight.product


def _own_levels(wanted: Sequence["LevelsWanted"]) -> list[list[float]]:
    """What the states themselves predict: the best scores and tokens of each sequence, among all tokens."""
    target = wanted[0].levels.target
    logits = target.head(target.norm(torch.cat([one.state for one in wanted])))
    best = []
    for row, one in zip(logits.split(1), wanted, strict=True):
        sampler, heads = one.sampler, _heads(one)
        ranked = sampler.best_drafts(row[0], heads.coupled, sampler.draft_context(), heads.width)
        best.append([*(score for _, score in ranked), *(float(token) for token, _ in ranked)])
    return best


def native_levels(
    target: "Target", heads: nn.Module, vocabulary: "DraftVocabulary", forwards: Forwards
) -> NativeLevels | None:
    """The levels of these heads by the library; None where some of what they need is not packed in ``forwards``."""
    if type(heads) is not DraftHeads or target.ranks.size > 1 or vocabulary.rows is None:
        return None
    modules = [heads._head(index) for index in range(heads.num_heads)]
    found = [(module, forwards.get(module)) for module in modules]
    packed = [(module, one) for module, one in found if isinstance(one, PackedHead)]
    if len(packed) < len(modules):
        return None
    rows = packed_by(forwards.get(vocabulary.rows))
    embeddings = _embeddings_of(target.model.get_input_embeddings())
    if not isinstance(rows, PackedLinears) or embeddings is None:
        return None
    return NativeLevels(heads, packed, rows.held, vocabulary.ids, *embeddings, target.logit_scale)


def _embeddings_of(module: nn.Module) -> tuple[torch.Tensor, int, float] | None:
    """The embeddings, what they are and the epsilon of their norm, for `NativeLevels`; None for others."""
    eps = torch.finfo(torch.float32).eps
    if isinstance(module, QuantisedEmbedding):
        # The norm of what is multiplied by a scale is that of what is not, with another epsilon.
        return module.weight.data, QUANTISED + module.kind.place, eps / module.scale**2
    if type(module) is not nn.Embedding or type(module.weight.data) is not torch.Tensor:
        return None
    table = module.weight.detach()
    if table.dtype not in _DTYPES or not table.is_contiguous():
        return None
    return table, BF16 if table.dtype == torch.bfloat16 else FP32, eps
