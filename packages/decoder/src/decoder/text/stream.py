"""Incremental detokenization: from tokens to text, piece by piece, without half characters."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # tokens of a character, if each is one byte of UTF-8
_MOST_OPEN = 16  # tokens that may wait for the end of a character before they count as invalid bytes


class TextStream:
    """Turns tokens into text as they come, and looks for stop strings.

    Text is settled, which means that no later token can change it, once it decodes without an unfinished character. A
    short tail of settled tokens is decoded again with each new token, because a token's text can depend on the one
    before.

    Args:
        tokenizer: decodes the tokens.
        stop: strings that end the text; they and what follows them are left out.

    Attributes:
        stopped: whether a stop string has been found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        self._ids: list[int] = []
        self._tail = 0  # index of the first token of the settled tail
        self._settled = 0  # how many tokens are settled
        self._given: list[str] = []  # what `take` has returned
        self._open = ""  # settled text that `take` has not returned
        self._single: dict[int, str] = {}
        self._skipped = _special_ids(tokenizer)

    @property
    def text(self) -> str:
        """All settled text, without a stop string and what follows it."""
        return "".join(self._given) + self._open

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _tail_text(self) -> str:
        """The text of the settled tail by itself; usually the tail is one token, whose text is cached."""
        tail = self._ids[self._tail : self._settled]
        if len(tail) != 1:
            return self._decode(tail)
        if tail[0] not in self._single:
            self._single[tail[0]] = self._decode(tail)
        return self._single[tail[0]]

    def push(self, token: int) -> None:
        """Add a token; sets ``stopped`` if it completes a stop string."""
        if token in self._skipped:
            # Decoding a whole text also drops special tokens first, so that those around them are neighbours.
            return
        self._ids.append(token)
        text = self._decode(self._ids[self._tail :])
        if not text.endswith(_REPLACEMENT):
            self._settle(text, len(self._ids))
        elif len(self._ids) - self._settled > _MOST_OPEN:
            # No character has so many bytes, so all but the last few are invalid whatever comes.
            ends = range(len(self._ids) - _LONGEST_CHARACTER, self._settled, -1)
            texts = {end: self._decode(self._ids[self._tail : end]) for end in ends}
            end = next((end for end, text in texts.items() if not text.endswith(_REPLACEMENT)), ends[0])
            self._settle(texts[end], end)

    def _settle(self, text: str, end: int) -> None:
        """Settle the tokens up to index ``end``; ``text`` is what the tail and they decode to."""
        self._extend(text[len(self._tail_text()) :])
        self._tail, self._settled = self._settled, end

    def _extend(self, new: str) -> None:
        # `take` never returns the beginning of a stop string, so only text that it has not returned is searched.
        start = max(0, len(self._open) - max(map(len, self.stop), default=0))
        self._open += new
        found = [at for s in self.stop if (at := self._open.find(s, start)) >= 0]
        if found:
            self._open = self._open[: min(found)]
            self.stopped = True

    def take(self, final: bool = False) -> str:
        """The text since the last call; unless ``final``, an end that may become a stop string is held back."""
        if final and not self.stopped:
            self._extend(self._decode(self._ids[self._tail :])[len(self._tail_text()) :])
        end = len(self._open) if final or self.stopped else len(self._open) - self._pending()
        piece, self._open = self._open[:end], self._open[end:]
        self._given.append(piece)
        return piece

    def _pending(self) -> int:
        """The length of the longest end of the open text with which a stop string begins."""
        longest = min(max((len(s) - 1 for s in self.stop), default=0), len(self._open))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._open[-n:]) for s in self.stop)), 0)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special tokens, which decoding with ``skip_special_tokens`` leaves out."""
    marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)
