"""How a prompt gets into the cache: chunk by chunk, so that other texts can take a step between two chunks."""

from collections.abc import Mapping
from itertools import pairwise

import torch

from decoder.backends.base import PassOutput
from decoder.drafters.base import ReadsPrompt, feature_reader
from decoder.model.target import Target
from decoder.prefix_reuse import PrefixReuse, Reused
from decoder.sequence import Sequence
from decoder.work import Progress, Work, timed

_MARKED = 16  # tokens


def prefill(target: Target, sequence: Sequence, prefixes: PrefixReuse | None, short: bool = False) -> Work[None]:
    """Commit the prompt to the cache, except for its last token, which is the root of the first tree.

    Then the drafter starts, unless the text ends here. The target must be patched whenever this goes on.

    Args:
        prefixes: where the prompt may begin; None to run all of it.
        short: whether chunks are short, for callers who must look at something else between two of them.
    """
    return timed(_prefill(target, sequence, prefixes, short), sequence.statistics.count_prefill)


def _prefill(target: Target, sequence: Sequence, prefixes: PrefixReuse | None, short: bool) -> Work[None]:
    drafter, cache, statistics = sequence.drafter, sequence.cache, sequence.statistics
    prompt, observed = sequence.sampler.context[:-1], drafter.observed_queries
    if prefixes is not None:
        prefixes.begin(cache)
    scores, reader = sequence.prompt_scores, feature_reader(drafter)
    if scores is not None:
        scores.begin()
        short = True  # logits of many tokens take much memory
        prefixes = None  # they come from passes over the whole prompt

    def read(output: PassOutput) -> None:
        if reader is not None:
            reader.read_features(output)
        if scores is not None:
            scores.read(output)

    reused: Reused | None = None
    if prefixes is not None:
        reused = yield from prefixes.taking_over(prompt, cache, observed, reader)
    first = 0 if reused is None else reused.count
    if not statistics.steps:  # of the prompt, and not of what a preempted text has written
        statistics.reused_tokens = first
    read_by_drafter = drafter.prompt_reader() if isinstance(drafter, ReadsPrompt) else None
    if read_by_drafter is not None:
        # What the target takes over the drafter has not read.
        for begin, end in pairwise(target.prefill_borders(first, short)):
            read_by_drafter(end)
            yield Progress(end - begin, len(prompt) - end)
    queries: Mapping[int, torch.Tensor] = {}
    borders = [first + border for border in target.prefill_borders(len(prompt) - first, short)]
    if prefixes is not None and target.mixers:
        borders = _with_mark(borders, len(prompt) - max(1, observed))
    for begin, end in pairwise(borders):
        asked = observed if end == len(prompt) else 0
        queries = target.prefill(prompt[begin:end], cache, asked, read, scores is not None)
        if prefixes and reused and begin == first and not prefixes.confirm(reused, cache):
            if reader is not None:
                reader.begin_with(None, 0)
            return (yield from _prefill(target, sequence, None, short))
        if prefixes is not None:
            cache.mark()
        if read_by_drafter is not None:
            read_by_drafter(end)
        target.wait()
        yield Progress(end - begin, len(prompt) - end)
    if not sequence.remaining:
        sequence.finish_reason = "length"
        return
    work = drafter.start(cache, queries)
    if work is not None:
        yield from work
    target.wait()


def _with_mark(borders: list[int], last: int) -> list[int]:
    """Borders with one more, not behind ``last``: where another text with the same prompt may take over states."""
    border = last - last % _MARKED
    return sorted({*borders, border}) if borders[0] < border < borders[-1] else borders
