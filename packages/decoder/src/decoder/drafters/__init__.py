"""The methods: every drafter under the name that users give."""

from decoder.drafters.autoregressive import Autoregressive
from decoder.drafters.base import Drafter, Resources
from decoder.drafters.magicdec import MagicDec
from decoder.drafters.medusa import Medusa
from decoder.drafters.prompt_lookup import PromptLookup
from decoder.drafters.tokenswift import TokenSwift
from decoder.drafters.triforce import TriForce

METHODS: dict[str, type[Drafter]] = {
    "ar": Autoregressive,
    "tokenswift": TokenSwift,
    "medusa": Medusa,
    "triforce": TriForce,
    "magicdec": MagicDec,
    "prompt-lookup": PromptLookup,
}

__all__ = [
    "METHODS",
    "Autoregressive",
    "Drafter",
    "MagicDec",
    "Medusa",
    "PromptLookup",
    "Resources",
    "TokenSwift",
    "TriForce",
]
