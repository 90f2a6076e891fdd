"""How a prompt is cut into passes."""

from itertools import pairwise


def prompt_chunks(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """Where the chunks of a prompt's tokens from ``start`` to ``end`` begin and end, each of at most ``size`` tokens.

    A smaller one comes first, so that the last one is as large as can be: of its tokens queries are observed.
    """
    borders = [start, *range(start + ((end - start) % size or size), end, size), end]
    return list(pairwise(borders)) if start < end else []
