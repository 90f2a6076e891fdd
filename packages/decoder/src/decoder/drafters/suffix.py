"""Suffix retrieval: draft what followed earlier occurrences of the text's end (compare SuffixDecoding, 2411.04975)."""

from typing import ClassVar

from decoder.drafters.auto import Auto


class Suffix(Auto):
    """Cost-tuned trees from prompt and output alone; costs no pass over any weights."""

    heads_kinds: ClassVar[tuple[str, ...]] = ()
