"""Single tokens: the text and the bytes that each adds to a text, and where in the text it begins."""

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate, groupby

from transformers import PreTrainedTokenizerBase

from decoder.text.stream import REPLACEMENT, TextStream, special_ids

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The bytes for which the letters of byte-level vocabularies stand, as in GPT-2's."""


class TokenTexts:
    """What tokens add to a text in which others stand in front of them; by itself a first word may lack its space.

    Args:
        tokenizer: decodes the tokens.
        shown: special tokens that are part of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shown: Collection[int] = ()):
        self.tokenizer, self.shown = tokenizer, shown
        self.special = special_ids(tokenizer) - set(shown)
        # The most likely tokens are often the same ones, and each is decoded once.
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """The text of a token; a part of a character is shown as U+FFFD, and a special token by its name."""
        if token not in self._texts:
            alone = self._decode([token])
            if token not in self.special and self.first:
                before = self._decode(self.first)
                behind = self._decode([*self.first, token])
                alone = behind[len(before) :] if behind.startswith(before) else alone
            self._texts[token] = alone
        return self._texts[token]

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, which may be a part of a character."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return text.encode()
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, bytes):
            return piece
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):
            return bytes.fromhex(byte[1])
        if all(letter in _BYTE_LEVEL for letter in piece):
            return bytes(_BYTE_LEVEL[letter] for letter in piece)
        return text.encode()

    def name(self, token: int) -> str:
        """What a completion calls a token: its text, or its bytes where it is a part of a character."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token))

    def by_name(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """The log-probabilities of the most likely tokens of a completion, and of the one that is there, by name.

        Of several tokens with the same name the one that is there counts, or else the most likely one.
        """
        found: dict[str, float] = {}
        for other, value in top:
            found.setdefault(self.name(other), value)
        return {**found, self.name(token): logprob}

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @cached_property
    def first(self) -> list[int]:
        """A token that is a letter or digit, for others to stand behind; none if the vocabulary has no such token."""
        usable = (token for token in range(len(self.tokenizer)) if token not in self.special)
        return next(([token] for token in usable if _is_word(self._decode([token]))), [])


class TextOffsets(TextStream):
    """Where the tokens of a text begin in it, in characters; those of one character begin where it does.

    The text is the one that a `TextStream` gives. Of a run of tokens for bytes it shows each byte as invalid where one
    is, so the places of its tokens are known once they are settled.

    Args:
        texts: of the tokenizer.
        prompt_ids: the tokens in front of the text; None stands for any that show text.
    """

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int] | None):
        super().__init__(
            texts.tokenizer, prompt_ids=texts.first if prompt_ids is None else prompt_ids, shown=texts.shown
        )
        self._texts, self._prompt_tokens = texts, len(self._ids)
        self._length = 0  # of the settled text
        self._waiting: list[int] = []  # tokens whose places are not known yet
        self._found: list[int] = []

    def next(self, token: int) -> list[int]:
        """Where those tokens begin whose places are known with the next one, behind those that were returned before."""
        self._waiting.append(token)
        self.push(token)
        return self._taken()

    def rest(self) -> list[int]:
        """Where those tokens begin that are left, when no token follows."""
        self.take(final=True)
        return self._taken()

    def _taken(self) -> list[int]:
        if self._settled == len(self._ids):
            self._found += [self._length] * len(self._waiting)  # special ones
            self._waiting = []
        found, self._found = self._found, []
        return found

    def _settle(self, text: str, end: int) -> None:
        whole, shown = self._behind_tail(text, end), self._beyond_tail(text, end)
        of_prompt = len(whole) - len(shown)
        places = self._places(whole, self._ids[self._settled : end])
        for place in places[max(0, self._prompt_tokens - self._settled) :]:
            at = self._length + max(0, place - of_prompt)
            count = next(index for index, token in enumerate(self._waiting, 1) if token not in self._texts.special)
            self._found += [at] * count
            del self._waiting[:count]
        self._length += len(shown)
        super()._settle(text, end)

    def _places(self, text: str, ids: Sequence[int]) -> list[int]:
        """Where in ``text`` the tokens begin that it belongs to."""
        if len(ids) == 1:
            return [0]
        places: list[int] = []
        at = 0
        for single, group in groupby(ids, self._bytes.__contains__):
            parts = [self._texts.bytes_of(token) for token in group]
            data = b"".join(parts)
            shown = data.decode(errors="replace")
            if single and (REPLACEMENT in shown or not text.startswith(shown, at)):
                places += range(at, at + len(data))
                at += len(data)
                continue
            for start in accumulate(map(len, parts[:-1]), initial=0):
                places.append(at + max(0, len(data[: start + 1].decode(errors="replace")) - 1))
            at += len(shown)
        return places


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalnum()
