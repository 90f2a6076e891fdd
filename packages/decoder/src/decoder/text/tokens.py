"""Single tokens: the text and the bytes that each adds to a text, and where in the text it begins."""

import codecs
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import islice

from transformers import PreTrainedTokenizerBase

from decoder.text.stream import REPLACEMENT, special_ids

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The bytes for which the letters of byte-level vocabularies stand, as in GPT-2's."""
_LONGEST_CHARACTER = 4  # bytes


class TokenTexts:
    """What tokens add to a text in which others stand in front of them; by itself a first word may lack its space.

    Args:
        tokenizer: decodes the tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.special = special_ids(tokenizer)
        # The most likely tokens are often the same ones, and each is decoded once.
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """The text of a token; a part of a character is shown as U+FFFD, and a special token by its name."""
        if token not in self._texts:
            alone = self.alone(token)
            if token not in self.special and self._first:
                before = self._decode(self._first)
                behind = self._decode([*self._first, token])
                alone = behind[len(before) :] if behind.startswith(before) else alone
            self._texts[token] = alone
        return self._texts[token]

    def alone(self, token: int) -> str:
        """The text of a token that is a text's first."""
        return self._decode([token])

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

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    @cached_property
    def _first(self) -> list[int]:
        """A token that is a letter or digit, for others to stand behind; none if the vocabulary has no such token."""
        usable = (token for token in range(len(self.tokenizer)) if token not in self.special)
        return next(([token] for token in usable if _is_word(self._decode([token]))), [])


class TextOffsets:
    """Where the tokens of a text begin in it, in characters; those of one character begin where it does.

    Args:
        texts: of the tokenizer.
        prompt_ids: the tokens in front of the text; None stands for any that show text.
    """

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int] | None):
        self._texts, self._length = texts, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        shown = (token for token in reversed(prompt_ids or ()) if token not in texts.special)
        end = list(islice(shown, _LONGEST_CHARACTER))[::-1]
        self._is_first = prompt_ids is not None and not end
        # The end of the prompt may be the beginning of a character.
        self._decoder.decode(b"".join(map(texts.bytes_of, end)))

    def next(self, token: int) -> int:
        """Where the next token begins."""
        if token in self._texts.special:
            return self._length
        data = self._texts.bytes_of(token)
        if self._is_first:
            self._is_first = False
            alone = self._texts.alone(token)
            data = data if REPLACEMENT in alone else alone.encode()
        begun, _ = self._decoder.getstate()
        if begun and data and not 0x80 <= data[0] < 0xC0:
            # The character is never finished.
            self._length += len(self._decoder.decode(b"", final=True))
        at = self._length
        self._length += len(self._decoder.decode(data))
        return at


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalnum()
