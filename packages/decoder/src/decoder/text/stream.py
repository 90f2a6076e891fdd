"""Incremental detokenization: from tokens to text, piece by piece, without half characters."""

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from itertools import islice
from os.path import commonprefix
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # tokens of a character, if each is one byte of UTF-8
_MOST_OPEN = 16  # tokens that may wait for the end of a character before they count as invalid bytes
_LONGEST_RUN = 64  # tokens for bytes whose text waits for those behind them
_PROMPT_END = 8  # tokens of a prompt's end, at least, that new tokens are decoded behind


class TextStream:
    """Turns tokens into text as they come, and looks for stop strings.

    The text of the tokens is what prompt and tokens together decode to beyond what the prompt does. By themselves they
    may decode to something else: tokenizers like SentencePiece leave out the space in front of the first word, and a
    prompt can end within a character, which then belongs to the new text as a whole.

    Text is settled, which means that no later token can change it, once it decodes without an unfinished character. Of
    tokens that stand for single bytes it takes another one behind them, since decoding shows all of them as invalid
    where one is; but a stop string counts at once, and a run of more than 64 is shown as far as it is valid. A short
    tail of settled tokens is decoded again with each new token, because a token's text can depend on the one before.

    Args:
        tokenizer: decodes the tokens.
        stop: strings that end the text; they and what follows them are left out.
        include_stop: whether the one that ends it is not left out.
        prompt_ids: the tokens in front, of which only the end is decoded.
        shown: special tokens that are part of the text.
        least: how many tokens come before stop strings count; one that they complete is text.

    Attributes:
        stopped: whether a stop string has been found.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        shown: Collection[int] = (),
        include_stop: bool = False,
        least: int = 0,
    ):
        self._include_stop, self._before_stops = include_stop, least
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        self._tail = 0  # index of the first token of the settled tail
        self._given: list[str] = []  # what `take` has returned
        self._open = ""  # settled text that `take` has not returned
        self._single: dict[int, str] = {}
        self._skipped = special_ids(tokenizer) - set(shown)
        self._hides = not shown  # whether decoding leaves special tokens out; else those that are skipped never come
        self._bytes = byte_ids(tokenizer)
        self._of_prompt = ""  # what the prompt shows of a character that it leaves unfinished
        self._ids = end_of_text(prompt_ids, self._decode, self._skipped)
        self._settled = self._settled_of_prompt()  # how many tokens are settled
        self._of_prompt = self._beyond_tail(self._decode(self._ids), len(self._ids))

    @property
    def text(self) -> str:
        """All settled text, without what follows a stop string, and without that unless it is included."""
        return "".join(self._given) + self._open

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self._hides, clean_up_tokenization_spaces=False)

    def _settled_of_prompt(self) -> int:
        """How many of the prompt's tokens no later token can change the text of."""
        fewest = max(0, len(self._ids) - _LONGEST_CHARACTER + 1)
        ends = range(len(self._ids), fewest, -1)
        return next((end for end in ends if not self._decode(self._ids[:end]).endswith(REPLACEMENT)), fewest)

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
        self._before_stops -= 1
        if token in self._skipped:
            # Decoding a whole text also drops special tokens first, so that those around them are neighbours.
            return
        self._ids.append(token)
        text = self._decode(self._ids[self._tail :])
        waits = token in self._bytes and len(self._ids) - self._settled < _LONGEST_RUN
        if waits and not (self.stop and self._stops_in(self._beyond_tail(text, len(self._ids)))):
            return
        if not text.endswith(REPLACEMENT):
            self._settle(text, len(self._ids))
        elif len(self._ids) - self._settled > _MOST_OPEN:
            # No character has so many bytes, so all but the last few are invalid whatever comes.
            ends = range(len(self._ids) - _LONGEST_CHARACTER, self._settled, -1)
            texts = {end: self._decode(self._ids[self._tail : end]) for end in ends}
            end = next((end for end, text in texts.items() if not text.endswith(REPLACEMENT)), ends[0])
            self._settle(texts[end], end)

    def _stops_in(self, new: str) -> list[tuple[int, int]]:
        """Where stop strings stand, begin and end, that text behind the open one completes."""
        if not self.stop or self._before_stops >= 0:
            return []
        # `take` never returns the beginning of a stop string, so only text that it has not returned is searched.
        start = max(0, len(self._open) - max(map(len, self.stop)))
        text, before = self._open[start:] + new, len(self._open) - start
        places = [(s, text.find(s, max(0, before - len(s) + 1))) for s in self.stop]
        return [(start + at, start + at + len(s)) for s, at in places if at >= 0]

    def _settle(self, text: str, end: int) -> None:
        """Settle the tokens up to index ``end``; ``text`` is what the tail and they decode to."""
        self._extend(self._beyond_tail(text, end))
        self._tail, self._settled, self._of_prompt = self._settled, end, ""

    def _beyond_tail(self, text: str, end: int) -> str:
        """What ``text``, of the settled tail and the tokens up to index ``end``, has beyond the tail and the prompt."""
        new = self._behind_tail(text, end)
        return new[len(commonprefix((new, self._of_prompt))) :]  # noqa: RUF071 (characters are meant)

    def _behind_tail(self, text: str, end: int) -> str:
        """What it has behind the tail, with what the prompt shows of a character that it leaves unfinished."""
        tail = self._tail_text()
        if not text.startswith(tail):
            # Of a long run of tokens for bytes that turns invalid, what has been given stays.
            text, tail = self._decode(self._ids[self._settled : end]), ""
        return text[len(tail) :]

    def _extend(self, new: str) -> None:
        found = self._stops_in(new)
        self._open += new
        if found:
            # The first one; of several that begin there, the one that was there first.
            self._open = self._open[: min(found)[self._include_stop]]
            self.stopped = True

    def take(self, final: bool = False) -> str:
        """The text since the last call; unless ``final``, an end that may become a stop string is held back."""
        if final and not self.stopped:
            self._settle(self._decode(self._ids[self._tail :]), len(self._ids))
        end = len(self._open) if final or self.stopped else len(self._open) - self._pending()
        piece, self._open = self._open[:end], self._open[end:]
        self._given.append(piece)
        return piece

    def _pending(self) -> int:
        """The length of the longest end of the open text with which a stop string begins."""
        longest = min(max((len(s) - 1 for s in self.stop), default=0), len(self._open))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._open[-n:]) for s in self.stop)), 0)


def end_of_text(ids: Sequence[int], decode: Callable[[list[int]], str], skipped: Collection[int] = ()) -> list[int]:
    """The last tokens of a text, without those that are ``skipped``, behind which others decode as in the whole text.

    There are enough of them to show a character that is neither unfinished nor a space, which might be left out.
    """
    count = _PROMPT_END
    while True:
        end = list(islice((token for token in reversed(ids) if token not in skipped), count))[::-1]
        if len(end) < count or decode(end).replace(REPLACEMENT, "").strip():
            return end
        count *= 2


_Find = Callable[[PreTrainedTokenizerBase], frozenset[int]]
_found: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple, frozenset[int]]] = WeakKeyDictionary()


def _once(find: _Find) -> _Find:
    """Look through a tokenizer's tokens once for all texts, as long as it gets no further tokens."""

    @wraps(find)
    def found(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        known = _found.setdefault(tokenizer, {})
        state = find, len(tokenizer), tuple(tokenizer.all_special_tokens)
        if state not in known:
            known[state] = find(tokenizer)
        return known[state]

    return found


@_once
def byte_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that stand for one byte each, as SentencePiece's do for what has no other tokens."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    found = zip(tokenizer.convert_tokens_to_ids(pieces), pieces, strict=True)
    ids = [token for token, piece in found if token is not None and tokenizer.convert_ids_to_tokens(token) == piece]
    return frozenset(ids) if ids and tokenizer.decode(ids[:1]) not in pieces else frozenset()


@_once
def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The special tokens, which decoding with ``skip_special_tokens`` leaves out."""
    marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(marked | set(tokenizer.all_special_ids))
