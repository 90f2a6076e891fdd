"""The methods: every drafter by the name that users give as ``method``."""

from decoder.drafters.ar import Autoregressive
from decoder.drafters.auto import Auto
from decoder.drafters.base import Drafter, DrafterContext, DraftsAhead
from decoder.drafters.eagle3 import Eagle3, TunedEagle3
from decoder.drafters.fused import Fused, TunedFused
from decoder.drafters.magicdec import MagicDec
from decoder.drafters.medusa import Medusa, TunedMedusa
from decoder.drafters.prompt_lookup import PromptLookup
from decoder.drafters.suffix import Suffix
from decoder.drafters.tokenswift import TokenSwift, TunedTokenSwift
from decoder.drafters.triforce import TriForce
from decoder.options import TokenSwiftOptions

METHODS: dict[str, type[Drafter]] = {
    "ar": Autoregressive,
    "tokenswift": TokenSwift,
    "medusa": Medusa,
    "eagle3": Eagle3,
    "triforce": TriForce,
    "magicdec": MagicDec,
    "prompt-lookup": PromptLookup,
    "suffix": Suffix,
    "tokenswift-fused": Fused,
    "auto": Auto,
}

TUNED: dict[str, type[Drafter]] = {
    "tokenswift": TunedTokenSwift,
    "medusa": TunedMedusa,
    "eagle3": TunedEagle3,
    "tokenswift-fused": TunedFused,
}
"""The drafters that replace those with a fixed tree where the user gives no tree."""


def drafter_class(method: str, options: TokenSwiftOptions) -> type[Drafter]:
    """The drafter of a method: a tuned one where no tree is given, unless the text would follow the clock with it."""
    if options.tree is None and options.verification == "exact":
        return TUNED.get(method, METHODS[method])
    return METHODS[method]


__all__ = [
    "METHODS",
    "TUNED",
    "Auto",
    "Autoregressive",
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
]
