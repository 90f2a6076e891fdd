"""Texts behind many prompts of token ids, written together in this process or on a cluster."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

from decoder.decoder import Decoder
from decoder.jobs.on_ray import Cluster, Do, Identity, identity_of
from decoder.options import TokenSwiftOptions
from decoder.sampling.params import SamplingParams

_BATCHES = 2  # of texts in a block of a cluster's


class Text(NamedTuple):
    """A text that is asked for.

    Attributes:
        prompt: token ids.
        new_tokens: how many follow; an end of the text is a token like others.
    """

    prompt: Sequence[int]
    new_tokens: int
    sampling: SamplingParams


class Manner(NamedTuple):
    """How texts are written, which changes none of them.

    Attributes:
        method: of drafting.
        max_batch: how many are decoded together at most.
    """

    method: str
    options: TokenSwiftOptions
    max_batch: int


def write_texts(
    load: Callable[[], Decoder], texts: Sequence[Text], manner: Manner, cluster: Cluster | None = None
) -> Generator[tuple[int, list[int]], None, None]:
    """The index and the new token ids of each text, as they are done.

    Args:
        load: makes the decoder; on a ``cluster`` it is sent to its processes.

    Raises:
        ValueError, OSError: as ``load`` does, or as `Cluster.map`.
        BatchError: texts failed, behind all others.
    """
    if cluster is None:
        yield from _written(load(), list(enumerate(texts)), manner)
        return
    asked, block = list(enumerate(texts)), manner.max_batch * _BATCHES
    with closing(cluster.map(partial(_ready, load, manner), asked, block)) as done:
        for (index, _), written, _ in done:
            yield index, written


def _written(dec: Decoder, asked: Sequence[tuple[int, Text]], manner: Manner) -> Iterator[tuple[int, list[int]]]:
    texts = [text for _, text in asked]
    stream = dec.stream_batch(
        [list(text.prompt) for text in texts],
        [text.new_tokens for text in texts],
        manner.method,
        [text.sampling for text in texts],
        manner.options,
        ignore_eos=True,
        max_batch=manner.max_batch,
    )
    with closing(stream):
        for place, chunk in stream:
            if chunk.output is not None:
                yield asked[place][0], chunk.output.token_ids


def _ready(load: Callable[[], Decoder], manner: Manner) -> tuple[Do, Identity]:
    dec = load()

    def do(asked: list[tuple[int, Text]]) -> list[list[int]]:
        written = dict(_written(dec, asked, manner))
        return [written[index] for index, _ in asked]

    return do, identity_of(dec)
