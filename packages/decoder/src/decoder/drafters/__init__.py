"""The methods: every drafter under the name that users give."""

from decoder.drafters.autoregressive import Autoregressive
from decoder.drafters.base import Drafter
from decoder.drafters.tokenswift import TokenSwift

METHODS: dict[str, type[Drafter]] = {"ar": Autoregressive, "tokenswift": TokenSwift}

__all__ = ["METHODS", "Autoregressive", "Drafter", "TokenSwift"]
