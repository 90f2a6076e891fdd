"""From tokens to text, piece by piece: no split characters, and nothing a later token would change."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # tokens, when each is one byte of UTF-8
_MOST_OPEN = 16


class TextStream:
    """Incremental decoding with stop strings.

    Text is settled once it decodes without an unfinished character; a short tail of settled tokens is decoded again
    with each new one, because a token's text can depend on its neighbour.

    Args:
        stop: strings that end the text; they and what follows them are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        self._ids: list[int] = []
        self._tail = 0
        self._settled = 0
        self._given: list[str] = []  # what `take` has returned
        self._open = ""  # settled text that it has not
        self._single: dict[int, str] = {}
        self._skipped = _special_ids(tokenizer)

    @property
    def text(self) -> str:
        """All settled text, without a stop string and what follows it."""
        return "".join(self._given) + self._open

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _tail_text(self) -> str:
        """What the settled tail decodes to without the tokens behind it: mostly one token, so remembered."""
        tail = self._ids[self._tail : self._settled]
        if len(tail) != 1:
            return self._decode(tail)
        if tail[0] not in self._single:
            self._single[tail[0]] = self._decode(tail)
        return self._single[tail[0]]

    def push(self, token: int) -> None:
        """Take one more token in; sets ``stopped`` when it completes a stop string."""
        if token in self._skipped:
            # As in decoding the whole: what stands on either side of a special token are neighbours.
            return
        self._ids.append(token)
        text = self._decode(self._ids[self._tail :])
        if not text.endswith(_REPLACEMENT):
            self._settle(text, len(self._ids))
        elif len(self._ids) - self._settled > _MOST_OPEN:
            # No character has so many bytes: all but the last few are garbage, and stay so whatever comes.
            ends = range(len(self._ids) - _LONGEST_CHARACTER, self._settled, -1)
            texts = {end: self._decode(self._ids[self._tail : end]) for end in ends}
            end = next((end for end, text in texts.items() if not text.endswith(_REPLACEMENT)), ends[0])
            self._settle(texts[end], end)

    def _settle(self, text: str, end: int) -> None:
        """The tokens up to ``end`` will change no more; ``text`` is what they and the tail decode to."""
        self._extend(text[len(self._tail_text()) :])
        self._tail, self._settled = self._settled, end

    def _extend(self, new: str) -> None:
        # What was given holds no beginning of a stop string, so none can begin there.
        start = max(0, len(self._open) - max(map(len, self.stop), default=0))
        self._open += new
        found = [at for s in self.stop if (at := self._open.find(s, start)) >= 0]
        if found:
            self._open = self._open[: min(found)]
            self.stopped = True

    def take(self, final: bool = False) -> str:
        """The text since the last call, without a tail that may yet become a stop string unless ``final``."""
        if final and not self.stopped:
            self._extend(self._decode(self._ids[self._tail :])[len(self._tail_text()) :])
        end = len(self._open) if final or self.stopped else len(self._open) - self._pending()
        piece, self._open = self._open[:end], self._open[end:]
        self._given.append(piece)
        return piece

    def _pending(self) -> int:
        """Length of the longest end of the open text that begins a stop string."""
        longest = min(max((len(s) - 1 for s in self.stop), default=0), len(self._open))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._open[-n:]) for s in self.stop)), 0)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that are no text: those that decoding leaves out with ``skip_special_tokens``."""
    marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)
