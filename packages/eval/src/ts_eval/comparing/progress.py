"""A generation under way: on disk step by step, so that a killed one goes on where it was."""

import copy
from collections.abc import Sequence
from pathlib import Path

import decoder
from decoder.parts import Journal, damaged, whole_lines

COUNTS = (
    "steps",
    "nodes",
    "drafted",
    "accepted",
    "ngram_accepted",
    "accepted_by_depth",
    "accepted_by_source",
    "cache_rebuilds",
    "prefill_seconds",
    "decode_seconds",
    "shared_seconds",
)
"""What is read of `decoder.Statistics`; everything else derives from these."""


def counts_of(statistics: "decoder.Statistics") -> dict:
    """The counts and times so far; the statistics themselves go on counting."""
    return {name: copy.copy(getattr(statistics, name)) for name in COUNTS}


def add_counts(first: dict, second: dict) -> dict:
    """Field by field; lists (by depth) and dicts (by source) entry by entry; None, not known, stays None."""
    return {name: _add(first[name], second[name]) for name in COUNTS}


def _add(first, second):
    if first is None or second is None:
        return None
    if isinstance(first, dict):
        return {key: first.get(key, 0) + second.get(key, 0) for key in {**first, **second}}
    if isinstance(first, list):
        length = max(len(first), len(second))
        padded = ([*values, *[0] * (length - len(values))] for values in (first, second))
        return [a + b for a, b in zip(*padded, strict=True)]
    return first + second


class Progress:
    """The steps of one generation, in memory and in a file: a header, then a line per step.

    A line is in the system's hands before the next step begins; the disk has it with the first one that is written
    after a second, and at the end: a kill loses nothing, a power cut little. A last line cut short is dropped on the
    next start.

    Args:
        path: the generation's file; one that holds the same header is continued, another is begun anew.
        header: what tells this generation from any other.

    Raises:
        ValueError: a line in the middle of the file is damaged.

    Attributes:
        token_ids: all new tokens.
        step_tokens: per step, its number of tokens.
        step_seconds, step_drafted, step_accepted, step_ngram_accepted: per step, the decode time and the tokens
            drafted, accepted, and accepted from n-grams since the generation began (None where they are not known).
        counts: the sums of `COUNTS`, None before the first step. After a cut, cache_rebuilds are not known, because
            only a finished generation tells them, and prefill_seconds are the first part's, that of the prompt alone.
        resumed_at: the number of tokens there were at each resumption.
        logprobs: the log-probability of each token; None where they are not known of all.
    """

    def __init__(self, path: Path, header: dict):
        self.path, self._header = path, header
        self.token_ids: list[int] = []
        self.step_tokens: list[int] = []
        self.step_seconds: list[float] = []
        self.step_drafted: list[int | None] = []
        self.step_accepted: list[int | None] = []
        self.step_ngram_accepted: list[int | None] = []
        self.resumed_at: list[int] = []
        self.logprobs: list[float] | None = []
        self.counts: dict | None = None
        self._before: dict | None = None
        self._journal = Journal(path, sync_seconds=1.0)
        self._load()
        if self.token_ids:
            self._begin_part(len(self.token_ids))
        else:
            self._journal.end = 0

    def _load(self) -> None:
        for number, (record, end) in enumerate(whole_lines(self.path)):
            if number == 0 and record != self._header:
                return
            try:
                if "resumed_at" in record:
                    self._begin_part(record["resumed_at"])
                elif number:
                    self._take(record["tokens"], record["counts"], record.get("logprobs"))
            except (KeyError, TypeError) as error:
                raise damaged(self.path, number + 1) from error
            self._journal.end = end

    def _begin_part(self, tokens: int) -> None:
        self.resumed_at.append(tokens)
        self._before = {**self.counts, "cache_rebuilds": None}

    def _take(self, tokens: Sequence[int], counts: dict, logprobs: Sequence[float] | None) -> None:
        self.counts = counts if self._before is None else add_counts(self._before, counts)
        if self._before is not None:
            self.counts["prefill_seconds"] = self._before["prefill_seconds"]
        self.token_ids += tokens
        self.logprobs = None if self.logprobs is None or logprobs is None else [*self.logprobs, *logprobs]
        self.step_tokens.append(len(tokens))
        self.step_seconds.append(round(self.counts["decode_seconds"], 7))
        self.step_drafted.append(self.counts["drafted"])
        self.step_accepted.append(self.counts["accepted"])
        self.step_ngram_accepted.append(self.counts["ngram_accepted"])

    def add(self, tokens: Sequence[int], counts: dict, logprobs: Sequence[float] | None = None) -> None:
        """Add a step: its tokens, the counts since this process began or continued the generation, log-probabilities.

        Raises OSError, naming the file, when the step cannot be written.
        """
        if not self._journal.is_open:
            self._journal.open()
            self._journal.append({"resumed_at": self.resumed_at[-1]} if self._journal.end else self._header)
        known = {} if logprobs is None else {"logprobs": list(logprobs)}
        self._journal.append({"tokens": list(tokens), "counts": counts, **known})
        self._take(tokens, counts, logprobs)

    def close(self) -> None:
        self._journal.close()

    def discard(self) -> None:
        """Drop the file: the generation is finished, and kept elsewhere."""
        self.close()
        self.path.unlink(missing_ok=True)
