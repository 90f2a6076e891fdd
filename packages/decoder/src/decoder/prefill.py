"""How a prompt gets into the cache: chunk by chunk, so that other texts can take a step between two chunks."""

import time
from collections.abc import Generator, Mapping
from itertools import pairwise

import torch

from decoder.drafters.base import ReadsFeatures, ReadsPrompt
from decoder.model.target import Target
from decoder.prefix_reuse import PrefixReuse
from decoder.sequence import Sequence


def prefill(target: Target, sequence: Sequence, prefixes: PrefixReuse | None) -> Generator[int, None, int]:
    """Commit the prompt to the cache, except for its last token, which is the root of the first tree.

    It stops behind each chunk of the prompt but the last, until it is asked to go on. The target must be patched
    whenever it runs.

    Args:
        prefixes: where the prompt may begin; None to run all of it.

    Yields:
        How many tokens the chunk had; those of the last one are returned.
    """
    start = time.perf_counter()
    drafter, cache, statistics = sequence.drafter, sequence.cache, sequence.statistics
    prompt, observed = sequence.sampler.context[:-1], drafter.observed_queries
    if prefixes is not None:
        prefixes.begin(cache)
    read = drafter.read_features if isinstance(drafter, ReadsFeatures) else None
    if read is not None and target.gives_features:
        # Features of the whole prompt come from passes over the whole prompt.
        prefixes = None
    reused = None if prefixes is None else prefixes.take_over(prompt, cache, observed)
    first = 0 if reused is None else reused.count
    queries: Mapping[int, torch.Tensor] = {}
    if not statistics.steps:  # of the prompt, and not of what a preempted text has written
        statistics.reused_tokens = first
    read_by_drafter = drafter.prompt_reader() if isinstance(drafter, ReadsPrompt) else None
    if read_by_drafter is not None:
        # What the target takes over the drafter has not read.
        for begin, end in pairwise(target.prefill_borders(first)):
            read_by_drafter(end)
            statistics.prefill_seconds += time.perf_counter() - start
            yield end - begin
            start = time.perf_counter()
    chunks = list(pairwise(first + border for border in target.prefill_borders(len(prompt) - first)))
    for place, (begin, end) in enumerate(chunks, start=1):
        last = place == len(chunks)
        queries = target.prefill(prompt[begin:end], cache, observed if last else 0, read)
        if prefixes and reused and place == 1 and not prefixes.confirm(reused, cache):
            statistics.prefill_seconds += time.perf_counter() - start
            return (yield from prefill(target, sequence, None))
        if read_by_drafter is not None:
            read_by_drafter(end)
        if not last:
            target.wait()
            statistics.prefill_seconds += time.perf_counter() - start
            yield end - begin
            start = time.perf_counter()
    drafter.start(cache, queries)
    target.wait()
    statistics.prefill_seconds += time.perf_counter() - start
    return chunks[-1][1] - chunks[-1][0] if chunks else 0
