"""The methods: every drafter by the name that users give as ``method``."""

from decoder.drafters.ar import Autoregressive
from decoder.drafters.auto import Auto
from decoder.drafters.base import Drafter, DrafterContext, DraftsAhead
from decoder.drafters.fused import Fused
from decoder.drafters.magicdec import MagicDec
from decoder.drafters.medusa import Medusa
from decoder.drafters.prompt_lookup import PromptLookup
from decoder.drafters.suffix import Suffix
from decoder.drafters.tokenswift import TokenSwift
from decoder.drafters.triforce import TriForce

METHODS: dict[str, type[Drafter]] = {
    "ar": Autoregressive,
    "tokenswift": TokenSwift,
    "medusa": Medusa,
    "triforce": TriForce,
    "magicdec": MagicDec,
    "prompt-lookup": PromptLookup,
    "suffix": Suffix,
    "tokenswift-fused": Fused,
    "auto": Auto,
}

__all__ = [
    "METHODS",
    "Auto",
    "Autoregressive",
    "Drafter",
    "DrafterContext",
    "DraftsAhead",
    "Fused",
    "MagicDec",
    "Medusa",
    "PromptLookup",
    "Suffix",
    "TokenSwift",
    "TriForce",
]
