"""Statistics of a generation, which the engine counts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Counts of one generation; the rates are the paper's measures (section 4.1).

    Attributes:
        steps: forward passes over the full cache.
        nodes: nodes of all verified trees, their roots included.
        generated: new tokens.
        drafted: sum over steps of the tree's depth (the paper's gamma + 1 for its fixed tree).
        accepted: drafted tokens accepted.
        ngram_accepted: accepted tokens of steps in which an n-gram reached as far as any candidate.
        accepted_by_source: accepted tokens by the source that proposed them ("heads", "ngrams", ...); one that several
            proposed counts for each.
        accepted_by_depth: entry i counts the steps that accepted a drafted token at depth i + 1.
        prefill_seconds, decode_seconds: device-synchronised wall time.
        shared_seconds: decode_seconds with the time of each step divided among the texts decoded in it; the sum over
            the texts of a batch is the time that the batch took.
        cache_rebuilds: selections of the partial cache.
        reused_tokens: tokens of the prompt whose entries were taken over from an earlier text.
    """

    steps: int = 0
    nodes: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    ngram_accepted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    shared_seconds: float = 0.0
    cache_rebuilds: int = 0
    reused_tokens: int = 0

    def count_prefill(self, seconds: float) -> None:
        """Count time that went by before the first step."""
        self.prefill_seconds += seconds

    def count_decoding(self, seconds: float, texts: int = 1) -> None:
        """Count the time of a step in which so many ``texts`` were decoded."""
        self.decode_seconds += seconds
        self.shared_seconds += seconds / texts

    def count_step(self, nodes: int, depth: int, sources: Sequence[Collection[str]], generated: int) -> None:
        """Count one step, which verified a tree of so many nodes and this ``depth`` and added ``generated`` tokens.

        ``sources`` has an entry for each drafted token that was accepted: the names of the sources that proposed it.
        """
        accepted = len(sources)
        self.steps += 1
        self.nodes += nodes
        self.generated += generated
        self.drafted += depth
        self.accepted += accepted
        if sources and "ngrams" in sources[-1]:
            self.ngram_accepted += accepted
        for names in sources:
            for name in names:
                self.accepted_by_source[name] = self.accepted_by_source.get(name, 0) + 1
        self.accepted_by_depth += [0] * (depth - len(self.accepted_by_depth))
        for level in range(accepted):
            self.accepted_by_depth[level] += 1

    @property
    def acceptance_rate(self) -> float | None:
        """alpha = accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def ngram_acceptance_rate(self) -> float | None:
        """beta = ngram_accepted / drafted; None when nothing was drafted."""
        return self.ngram_accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """New tokens per verification; None before the first step."""
        return self.generated / self.steps if self.steps else None
