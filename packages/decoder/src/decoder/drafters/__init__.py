"""The methods: every drafter by the name that users give as ``method``."""

from decoder.drafters.ar import Autoregressive
from decoder.drafters.auto import Auto, Suffix
from decoder.drafters.base import Drafter, DrafterContext, DraftsAhead
from decoder.drafters.draft_model import DraftModel, TunedDraftModel
from decoder.drafters.eagle3 import Eagle3, TunedEagle3
from decoder.drafters.fused import Fused, TunedFused
from decoder.drafters.magicdec import MagicDec
from decoder.drafters.medusa import Medusa, TunedMedusa
from decoder.drafters.prompt_lookup import PromptLookup
from decoder.drafters.tokenswift import TokenSwift, TunedTokenSwift
from decoder.drafters.triforce import TriForce
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.options import METHOD_NAMES, TokenSwiftOptions

METHODS: dict[str, type[Drafter]] = {
    "ar": Autoregressive,
    "tokenswift": TokenSwift,
    "medusa": Medusa,
    "eagle3": Eagle3,
    "draft-model": DraftModel,
    "triforce": TriForce,
    "magicdec": MagicDec,
    "prompt-lookup": PromptLookup,
    "suffix": Suffix,
    "tokenswift-fused": Fused,
    "auto": Auto,
}
if tuple(METHODS) != METHOD_NAMES:
    raise ImportError("decoder.options.METHOD_NAMES, which commands list, has other methods than METHODS")

TUNED: dict[str, type[Drafter]] = {
    "tokenswift": TunedTokenSwift,
    "medusa": TunedMedusa,
    "eagle3": TunedEagle3,
    "draft-model": TunedDraftModel,
    "tokenswift-fused": TunedFused,
}
"""The drafters that replace those with a fixed tree where the user gives no tree."""


def reads_text(method: str) -> bool:
    """Whether a draft model, where there is one, reads the whole sequence for this method, into a cache of its own."""
    return issubclass(METHODS[method], DraftModel) or getattr(METHODS[method], "takes_draft_model", False)


FEWEST_TUNED = 16
"""New tokens from which on it pays to measure what trees cost."""


def drafter_class(method: str, options: TokenSwiftOptions, max_new_tokens: int) -> type[Drafter]:
    """The drafter of a method for a sequence of so many new tokens.

    It is a tuned one where no tree is given, unless the text would follow the clock with it. A text that is too short
    to be worth tuning is decoded plainly.
    """
    found = METHODS[method]
    if options.tree is None and options.verification == "exact":
        found = TUNED.get(method, found)
    return Autoregressive if issubclass(found, CostTuned) and max_new_tokens < FEWEST_TUNED else found


__all__ = [
    "FEWEST_TUNED",
    "METHODS",
    "TUNED",
    "Auto",
    "Autoregressive",
    "DraftModel",
    "Drafter",
    "DrafterContext",
    "DraftsAhead",
    "Eagle3",
    "Fused",
    "MagicDec",
    "Medusa",
    "PromptLookup",
    "Suffix",
    "TokenSwift",
    "TriForce",
    "drafter_class",
    "reads_text",
]
