"""From tokens to text, piece by piece: no split characters, and nothing a later token would change."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"


class TextStream:
    """Incremental decoding with stop strings.

    Text is settled once it decodes without an unfinished character; a short tail of settled tokens is decoded again
    with each new one, because a token's text can depend on its neighbour.

    Args:
        stop: strings that end the text; they and what follows them are left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        self._tail = 0
        self._settled = 0
        self._emitted = 0

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> None:
        """Take one more token in; sets ``stopped`` when it completes a stop string."""
        self._ids.append(token)
        before = self._decode(self._ids[self._tail : self._settled])
        text = self._decode(self._ids[self._tail :])
        if not text.endswith(_REPLACEMENT):
            self._extend(text[len(before) :])
            self._tail, self._settled = self._settled, len(self._ids)

    def _extend(self, new: str) -> None:
        start = len(self.text)
        self.text += new
        longest = max(map(len, self.stop), default=0)
        found = [at for s in self.stop if (at := self.text.find(s, max(0, start - longest))) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def take(self, final: bool = False) -> str:
        """The text since the last call, without a tail that may yet become a stop string unless ``final``."""
        if final and not self.stopped:
            before = self._decode(self._ids[self._tail : self._settled])
            self._extend(self._decode(self._ids[self._tail :])[len(before) :])
        end = len(self.text) if final or self.stopped else len(self.text) - self._pending()
        piece = self.text[self._emitted : max(end, self._emitted)]
        self._emitted += len(piece)
        return piece

    def _pending(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) - 1 for s in self.stop), default=0)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self.text[-n:]) for s in self.stop)), 0)
