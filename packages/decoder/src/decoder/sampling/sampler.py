"""From logits to tokens, the same way for every method: one text's penalty window, filters and noise."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from decoder.kernels.transfers import download, on_host, upload
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.filters import first_argmax, process_logits
from decoder.sampling.noise import NoiseRows
from decoder.sampling.params import SamplingParams
from decoder.sampling.penalty_window import PenaltyWindow
from decoder.sampling.token_tree import TokenTree

LogitsHook = Callable[[list[int], torch.Tensor], torch.Tensor]


class Drawn(NamedTuple):
    """A token drawn at some position, before it is known whether the text goes there.

    Attributes:
        token: its id.
        score: its perturbed score; NaN or -inf where there was no token to draw.
        logprob: its log-probability under the filtered distribution; None where these are not kept.
    """

    token: int
    score: float
    logprob: float | None = None


class Sampler:
    """One text's choices: the penalty window that slides with it, and the noise of each position.

    Args:
        params: the user's sampling parameters.
        vocab_size: V, the number of logits per position.
        device: where the logits live.
        context: token ids so far (the prompt).
        logits_hook: ``hook(context_ids, logits [V]) -> logits [V]``, applied before the penalty.
        keep_logprobs: collect the log-probability of every chosen token in ``logprobs``.

    Attributes:
        context: the text so far, prompt and output.
        logprobs: of the output's tokens, where they are kept.

    Raises:
        ValueError: suppressed tokens that are outside of the vocabulary, or all of it.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        device: torch.device,
        context: Sequence[int],
        logits_hook: LogitsHook | None = None,
        keep_logprobs: bool = False,
    ):
        self.params, self.logits_hook = params, logits_hook
        self.context = list(context)
        self.logprobs: list[float] | None = [] if keep_logprobs else None
        self.noise = NoiseRows(params.seed, vocab_size, device)
        outside = next((token for token in params.suppress_tokens if token >= vocab_size), None)
        if outside is not None:
            raise ValueError(f"suppress_tokens has {outside}, which is outside the vocabulary of {vocab_size}")
        if len(set(params.suppress_tokens)) == vocab_size:
            raise ValueError("suppress_tokens forbids the whole vocabulary: leave at least one token")
        self._suppressed = upload(params.suppress_tokens, device) if params.suppress_tokens else None
        self.window = PenaltyWindow(params.window, vocab_size, device, self.context)

    def draft_context(self, drafted: Sequence[int] = ()) -> DraftContext:
        """The text with ``drafted`` behind it, for drafts to go on from."""
        context = DraftContext(self.window, self.noise, self.context)
        for token in drafted:
            context.push(token)
        return context

    def in_window(self, drafted: Sequence[int] = ()) -> torch.Tensor | None:
        """Tokens under penalty once ``drafted`` has entered the text, bool [V]; None when nothing is penalised."""
        return self.draft_context(drafted).in_window()

    def filtered(self, logits: torch.Tensor, drafted: Sequence[int] = ()) -> torch.Tensor:
        """Hook, penalty and filters on logits [V]: unnormalised log-probabilities, float64 [V].

        The hook sees the text with ``drafted`` behind it; the penalty window is that of the text alone.
        """
        if self.logits_hook is not None:
            shape = logits.shape
            # The user may keep or change them, and the next pass may write over those that the model gave.
            logits = self.logits_hook([*self.context, *drafted], logits.clone())
            if not isinstance(logits, torch.Tensor) or logits.shape != shape:
                raise ValueError(f"logits_hook must return a tensor of the shape it was given, {list(shape)}")
        return self.processed(logits.double(), self.window.penalised)

    def processed(
        self, logits: torch.Tensor, in_window: torch.Tensor | None, token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Suppressed tokens, penalty and filters on logits [..., V]; dtype is kept.

        ``token_ids`` [v], where given, tells which tokens alone the logits [..., v] are of.
        """
        if self._suppressed is not None and token_ids is None:
            logits = logits.index_fill(-1, self._suppressed, -torch.inf)
        elif self._suppressed is not None:
            logits = logits.masked_fill(torch.isin(token_ids, self._suppressed), -torch.inf)
        if in_window is not None and token_ids is not None:
            in_window = in_window.index_select(-1, token_ids)
        return process_logits(logits, self.params, in_window)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Perturbed scores, float64 [V], of the next position's logits [V]: their argmax is the chosen token."""
        return self._perturbed(self.filtered(logits))

    def _perturbed(self, filtered: torch.Tensor) -> torch.Tensor:
        return filtered if self.params.greedy else filtered + self.noise.rows(len(self.context), 1)[0]

    def draw(self, logits: torch.Tensor) -> Drawn:
        """The token of the next position, drawn from its logits [V]; the host waits for it."""
        filtered = self.filtered(logits)
        scores = self._perturbed(filtered)
        if on_host(scores):
            # NumPy's argmax promises the first of equal scores, at a tenth of what `first_argmax` costs.
            values = scores.numpy(force=True)
            token = int(values.argmax())
            return Drawn(token, float(values[token]), None if self.logprobs is None else log_prob(filtered, token))
        best = scores.amax(-1, keepdim=True)
        token = first_argmax(scores, best)[None]
        known = [token, best]
        if self.logprobs is not None:
            known.append(filtered.log_softmax(-1).index_select(0, token))
        token, *rest = download(torch.cat(known))
        return Drawn(int(token), *rest)

    def take(self, drawn: Drawn) -> int:
        """Append a drawn token to the text.

        Raises:
            ValueError: there was none to draw.
        """
        if not drawn.score > -math.inf:
            if math.isnan(drawn.score):
                raise ValueError("the logits hold NaN: the model's dtype overflows, or logits_hook returned it")
            raise ValueError("no token is left to choose from: suppress_tokens or logits_hook forbid all of them")
        if self.logprobs is not None:
            self.logprobs.append(drawn.logprob)
        self.push(drawn.token)
        return drawn.token

    def push(self, token: int) -> None:
        """Append a token to the text."""
        self.context.append(token)
        self.window.push(token)

    def draft_scores(
        self,
        logits: torch.Tensor,
        coupled: bool,
        context: DraftContext,
        token_ids: torch.Tensor | None = None,
        skip: int = 0,
    ) -> torch.Tensor:
        """Scores to rank draft candidates by, float64 [n, V], for the logits of the next n positions.

        Coupled (Gumbel coupling, arXiv 2408.07978): log q plus the very noise that will choose the target's token.
        All rows see the window of the first. ``token_ids`` [v] as for `processed`; ``skip`` positions lie before the
        first row's.
        """
        filtered = self.processed(logits.double(), context.in_window(), token_ids)
        if self.params.greedy or not coupled:
            return filtered
        noise = context.noise(len(logits), skip)
        return filtered + (noise if token_ids is None else noise.index_select(-1, token_ids))

    def branch_scores(
        self,
        logits: torch.Tensor,
        coupled: bool,
        context: DraftContext,
        drafted: torch.Tensor,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`draft_scores` for the position behind n branches of equal length: float32 [n, V] for logits [n, V].

        The branches part where ``context`` ends. Row i sees the window with ``drafted[i]`` in it, int64 [n, length];
        that as many old tokens leave it is passed over, and single precision is enough where a wrong rank only costs a
        draft. ``token_ids`` [v] as for `processed`.
        """
        seen, length = context.in_window(), drafted.shape[1]
        if seen is not None and length:
            seen = seen.expand(len(drafted), -1).scatter(1, drafted, True)
        filtered = self.processed(logits.float(), seen, token_ids)
        if self.params.greedy or not coupled:
            return filtered
        noise = context.noise(1, skip=length)[0]
        return filtered + (noise if token_ids is None else noise.index_select(0, token_ids)).float()

    def draft_choice(self, logits: torch.Tensor, coupled: bool, drafted: Sequence[int]) -> int:
        """The best candidate for the position behind ``drafted``, from its logits [V]."""
        return int(first_argmax(self.draft_scores(logits[None], coupled, self.draft_context(drafted))[0]))


def log_prob(filtered: torch.Tensor, token: int) -> float:
    """The log-probability of a token under unnormalised log-probabilities [V]."""
    return float(filtered.log_softmax(-1)[token])


class TreeDraws:
    """The token drawn at every node of a tree, each from that node's own context, in one go and without waiting.

    Where the host is slow to hear from the device it is told once, of all nodes, and finds the path by itself. The
    device finds it too, by following each node to the child that holds its token: what it drafts for the next step may
    begin before the host knows (`last_node`, `draft_context`). No logits_hook is called.

    Args:
        tree: the candidates, T nodes.
        logits: [T or more, V], the target's for every node.
        sampler: of the text that ends with the tree's root.

    Attributes:
        sampler: see above.
        numbers: what `read` takes once the host has it: float64 [2 T], or [3 T] where log-probabilities are kept.
    """

    def __init__(self, tree: TokenTree, logits: torch.Tensor, sampler: Sampler):
        self._tree, self.sampler = tree, sampler
        nodes, device = len(tree), logits.device
        self._depths = upload(tree.depths, device) if nodes > 1 else None
        self._leaving: list[int | None] = [None] * nodes
        self._counts = self._window_counts(device) if sampler.window.size else None
        in_window = None if self._counts is None else self._counts > 0
        filtered = sampler.processed(logits[:nodes].double(), in_window)
        scores = filtered
        if not sampler.params.greedy:
            noise = sampler.noise.rows(len(sampler.context), tree.depth + 1)
            scores = filtered + (noise if self._depths is None else noise.index_select(0, self._depths))
        best = scores.amax(-1, keepdim=True)
        self._tokens = first_argmax(scores, best)
        told = [self._tokens.double(), best[:, 0]]
        if sampler.logprobs is not None:
            told.append(filtered.log_softmax(-1).gather(-1, self._tokens[:, None])[:, 0])
        self.numbers = torch.cat(told)
        self._last: torch.Tensor | None = None
        self._drawn: list[Drawn] = []

    def _window_counts(self, device: torch.device) -> torch.Tensor:
        """How often each token stands in the penalty window of each node, int32 [T, V].

        A node's window has the tokens of its path behind those of the text, as many of whose oldest have left it.
        """
        tree, window = self._tree, self.sampler.window
        changes: list[tuple[int, int]] = []  # places in the table, and what to add there
        for node in range(len(tree)):
            path = [tree.tokens[n] for n in tree.path(node)[1:]]
            first = node * len(window.counts)

            def oldest(place: int, path: list[int] = path) -> int:
                return window.tokens[place] if place < len(window.tokens) else path[place - len(window.tokens)]

            gone = max(0, len(window.tokens) + len(path) - window.size)
            changes += [(first + token, 1) for token in path]
            changes += [(first + oldest(place), -1) for place in range(gone)]
            # One more leaves a full window when the token drawn here enters.
            full = len(window.tokens) + len(path) - gone == window.size
            self._leaving[node] = oldest(gone) if full else None
        counts = window.counts.expand(len(tree), -1)
        if not changes:
            return counts
        places, values = upload(list(zip(*changes, strict=True)), device)
        counts = counts.clone()
        counts.view(-1).index_add_(0, places, values.int())
        return counts

    def read(self, numbers: Sequence[float]) -> None:
        """Take in the values of `numbers`."""
        count = len(self._tree)
        columns = [numbers[start : start + count] for start in range(0, len(numbers), count)]
        self._drawn = [Drawn(int(token), *rest) for token, *rest in zip(*columns, strict=True)]

    def __call__(self, node: int) -> Drawn:
        """What was drawn at ``node``; `read` comes before."""
        return self._drawn[node]

    @property
    def last_node(self) -> torch.Tensor:
        """The last accepted node, int64 [1]: the first on the way from the root none of whose children was drawn."""
        if self._last is None:
            tree, device = self._tree, self._tokens.device
            nodes = torch.arange(len(tree), device=device)
            parents, tokens = upload([[0, *tree.parents[1:]], tree.tokens], device)
            # A node whose parent drew its token is where its parent goes on; the root is nobody's child.
            drawn = (self._tokens.index_select(0, parents) == tokens) & (nodes > 0)
            onward = nodes.scatter_reduce(0, parents, torch.where(drawn, nodes, 0), "amax")
            at = nodes[:1]
            for _ in range(tree.depth):
                at = onward.index_select(0, at)
            self._last = at
        return self._last

    @property
    def draft_context(self) -> DraftContext:
        """The text behind the token that was drawn at the last accepted node."""
        node, base = self.last_node, self.sampler.draft_context()
        newest = self._tokens.index_select(0, node)
        added = node.new_ones(1) if self._depths is None else self._depths.index_select(0, node) + 1
        counts = None
        if self._counts is not None:
            counts = self._counts.index_select(0, node)[0]
            counts.index_add_(0, newest, counts.new_ones(1))
            if any(token is not None for token in self._leaving):
                known = [(token or 0, -(token is not None)) for token in self._leaving]
                tokens, change = upload(list(zip(*known, strict=True)), node.device).index_select(1, node)
                counts.index_add_(0, tokens, change.int())
        return DraftContext.behind_verification(base, added, self._tree.depth + 1, newest, counts)
