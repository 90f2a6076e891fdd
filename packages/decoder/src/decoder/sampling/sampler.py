"""Penalty, filters, noise: from logits to one token, the same way for every method.

Pure functions on logits, and `Sampler`, which carries one generation's penalty window and noise.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import torch

from decoder.kernels.transfers import download, on_host, upload
from decoder.sampling.noise import NoiseRows
from decoder.sampling.params import SamplingParams

LogitsHook = Callable[[list[int], torch.Tensor], torch.Tensor]


def penalise(logits: torch.Tensor, in_window: torch.Tensor, penalty: float) -> torch.Tensor:
    """Repetition penalty (paper section 3.5): ``logits`` [..., V] where ``in_window`` [V] bool, / or * ``penalty``.

    Positive ones are divided and the others multiplied, which is the smaller result of the two; below 1 the greater.
    """
    worse = torch.minimum if penalty > 1 else torch.maximum
    return torch.where(in_window, worse(logits / penalty, logits * penalty), logits)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k highest logits of each row; equal ones with the smaller token id first."""
    if k >= logits.shape[-1]:
        return logits
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return logits.scatter(-1, order[..., k:], -torch.inf)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the most probable tokens until their mass reaches p; at least one, equal ones with the smaller id first."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ranked.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    drop = mass_before >= p
    drop[..., :1].fill_(False)
    return ranked.masked_fill(drop, -torch.inf).gather(-1, order.argsort(-1))


def keep_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Drop tokens with probability below min_p times the highest one's; their ratio needs no normalisation."""
    floor = logits.amax(-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < floor, -torch.inf)


def keep_eta(logits: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Eta sampling (Hewitt et al., 2022): drop p < min(eps, sqrt(eps) * exp(-entropy)); the best token stays."""
    log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities).nan_to_num(nan=0.0).sum(-1, keepdim=True)
    eta = torch.minimum(torch.full_like(entropy, epsilon), epsilon**0.5 * (-entropy).exp())
    drop = (probabilities < eta) & (logits < logits.amax(-1, keepdim=True))
    return logits.masked_fill(drop, -torch.inf)


def process_logits(logits: torch.Tensor, params: SamplingParams, in_window: torch.Tensor | None) -> torch.Tensor:
    """The filtered, unnormalised log-probabilities of each row [..., V], -inf where a filter dropped; dtype is kept.

    ``in_window`` [..., V] bool marks the tokens of the penalty window; None stands for an empty window.
    """
    if in_window is not None and params.repetition_penalty != 1:
        logits = penalise(logits, in_window, params.repetition_penalty)
    if params.greedy:
        return logits
    if params.temperature != 1:
        logits = logits / params.temperature
    if params.top_k:
        logits = keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    if params.min_p:
        logits = keep_min_p(logits, params.min_p)
    if params.eta_cutoff:
        logits = keep_eta(logits, params.eta_cutoff)
    return logits


def first_argmax(scores: torch.Tensor, best: torch.Tensor | None = None) -> torch.Tensor:
    """Index of the highest score of each row of [..., V]; of equal ones the smallest, which torch does not promise.

    The last one where scores are NaN. ``best`` [..., 1] are the highest scores, where they are known already.
    """
    ids = torch.arange(scores.shape[-1], device=scores.device)
    best = scores.amax(-1, keepdim=True) if best is None else best
    return torch.where(scores == best, ids, ids[-1]).amin(-1)


class PenaltyWindow:
    """The newest tokens of the text, which the repetition penalty is for.

    Args:
        size: tokens of a full window; 0 when nothing is penalised.
        text: what came before, of which the newest tokens are in the window.

    Attributes:
        tokens: the oldest first.
        counts: how often each token stands among them, int32 [V].
    """

    def __init__(self, size: int, vocab_size: int, device: torch.device, text: Sequence[int]):
        self.size = size
        self.tokens = deque(text[-size:] if size else ())
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._penalised: torch.Tensor | None = None
        if self.tokens:
            tokens = upload(list(self.tokens), device)
            self.counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))

    def push(self, token: int) -> None:
        """Take in the text's next token; the oldest one leaves a full window."""
        if not self.size:
            return
        self._penalised = None
        self.tokens.append(token)
        self.counts[token].add_(1)
        if len(self.tokens) > self.size:
            self.counts[self.tokens.popleft()].sub_(1)

    @property
    def penalised(self) -> torch.Tensor | None:
        """The tokens in it, bool [V], not to be written to; None when nothing is penalised."""
        if self.size and self._penalised is None:
            self._penalised = self.counts > 0
        return self._penalised


class Ahead:
    """The text as it goes on along tokens that only the device may know yet: its penalty window and its noise.

    Nothing here waits for the device: a token that leaves the window is either one of the text, known to the host, or
    one of those behind it. Good until the text itself goes on. Behind a number of tokens that only the device knows
    (`after`) tokens still enter the window, but none leaves it: drafts may be ranked with that.

    Args:
        window: of the text; left as it is.
        noise: of all positions.
        text: all of it.
    """

    def __init__(self, window: PenaltyWindow, noise: NoiseRows, text: Sequence[int]):
        self._window, self._counts = window, window.counts
        self._noise, self._text = noise, text
        self._tokens: list[int | torch.Tensor] = []
        self._one: torch.Tensor | None = None
        # What lies between the text and the first pushed token, where the device alone knows how long that is.
        self._between: tuple[torch.Tensor, torch.Tensor] | None = None

    def after(self, tokens: torch.Tensor, count: torch.Tensor) -> "Ahead":
        """What is ahead of the text once the first ``count`` of ``tokens`` have entered it; nothing was pushed yet.

        ``tokens`` int64 [n] and ``count`` int64 [1], from 1 to n, are known to the device alone.
        """
        after = Ahead(self._window, self._noise, self._text)
        after._between = tokens, count
        window = self._window
        if window.size:
            entered = (torch.arange(len(tokens), device=count.device) < count).int()
            after._counts = self._counts.index_add(0, tokens, entered)
            full = max(0, window.size - len(window.tokens))  # tokens that make none leave
            leaving = list(islice(window.tokens, max(0, len(tokens) - full)))
            if leaving:
                gone = torch.cat((upload(leaving, count.device), tokens))[: len(tokens) - full]
                after._counts.index_add_(0, gone, entered[full:], alpha=-1)
        return after

    def push(self, token: int | torch.Tensor) -> None:
        """Go on with ``token``: an id, or an int64 tensor [1] that holds one."""
        self._tokens.append(token)
        size, within = self._window.size, self._window.tokens
        if not size:
            return
        if self._counts is self._window.counts:
            self._counts = self._counts.clone()
        self._count(token, 1)
        leaving = len(within) + len(self._tokens) - size - 1
        if self._between is not None or leaving < 0:
            return
        self._count(within[leaving] if leaving < len(within) else self._tokens[leaving - len(within)], -1)

    def newest(self) -> torch.Tensor:
        """The last token, int64 [1]."""
        token = self._tokens[-1] if self._tokens else self._text[-1]
        if self._between is not None and not self._tokens:
            tokens, count = self._between
            token = tokens.index_select(0, count - 1)
        return token if isinstance(token, torch.Tensor) else upload([token], self._counts.device)

    def in_window(self) -> torch.Tensor | None:
        """Tokens under penalty behind all that were pushed, bool [V]; None when nothing is penalised."""
        if self._counts is self._window.counts:
            return self._window.penalised
        return self._counts > 0

    def noise(self, count: int, skip: int = 0) -> torch.Tensor:
        """Noise of ``count`` positions, the first ``skip`` behind the next one, float64 [count, V]."""
        start = len(self._tokens) + skip
        # From the end of the text on: what is made for many positions at a time must serve the next step, too.
        if self._between is None:
            return self._noise.rows(len(self._text), count, skip=start)
        tokens, passed = self._between
        rows = self._noise.rows(len(self._text), len(tokens) + start + count)
        return rows.index_select(0, passed + torch.arange(start, start + count, device=rows.device))

    def _count(self, token: int | torch.Tensor, change: int) -> None:
        if isinstance(token, int):
            self._counts[token].add_(change)
        else:
            if self._one is None:
                self._one = self._counts.new_ones(1)
            self._counts.index_add_(0, token, self._one, alpha=change)


class Sampler:
    """One generation's choices: the penalty window that slides with the text, and the noise of each position.

    Args:
        params: the user's sampling parameters.
        vocab_size: V, the number of logits per position.
        device: where the logits live.
        context: token ids so far (the prompt).
        logits_hook: ``hook(context_ids, logits [V]) -> logits [V]``, applied before the penalty.
        keep_logprobs: collect the log-probability of every chosen token in ``logprobs``.
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
        self._window = PenaltyWindow(params.window, vocab_size, device, self.context)

    def ahead(self, drafted: Sequence[int] = ()) -> Ahead:
        """What is ahead of the text behind ``drafted``, to be moved on."""
        ahead = Ahead(self._window, self.noise, self.context)
        for token in drafted:
            ahead.push(token)
        return ahead

    def in_window(self, drafted: Sequence[int] = ()) -> torch.Tensor | None:
        """Tokens under penalty once ``drafted`` has entered the text, bool [V]; None when nothing is penalised."""
        return self.ahead(drafted).in_window()

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
        return self._processed(logits.double(), self.in_window())

    def _processed(self, logits: torch.Tensor, in_window: torch.Tensor | None) -> torch.Tensor:
        if self._suppressed is not None:
            logits = logits.index_fill(-1, self._suppressed, -torch.inf)
        return process_logits(logits, self.params, in_window)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Perturbed scores, float64 [V], of the next position's logits [V]: their argmax is the chosen token."""
        return self._perturbed(self.filtered(logits), self.ahead())

    def _perturbed(self, filtered: torch.Tensor, ahead: Ahead) -> torch.Tensor:
        return filtered if self.params.greedy else filtered + ahead.noise(1)[0]

    def choose(self, logits: torch.Tensor) -> int:
        """Draw the token of the next position from its logits [V] and move the window past it.

        Raises:
            ValueError: as `settle`.
        """
        filtered = self.filtered(logits)
        if not on_host(filtered):
            return self.settle(*download(torch.cat(self._drawn(filtered, self.ahead()))))
        # NumPy's argmax promises the first of equal scores, at a tenth of what `first_argmax` costs.
        scores = self._perturbed(filtered, self.ahead()).numpy(force=True)
        token = int(scores.argmax())
        logprob = None if self.logprobs is None else float(filtered.log_softmax(-1)[token])
        return self.settle(token, float(scores[token]), logprob)

    def draw(self, logits: torch.Tensor, ahead: Ahead) -> list[torch.Tensor]:
        """Draw the token of the position behind ``ahead`` from its logits [V], without waiting for the device.

        Returns:
            What `settle` takes once it is known to the host: the token, int64 [1], always within the vocabulary; its
            score, float64 [1]; and its log-probability, float64 [1], where these are kept. No logits_hook is called.
        """
        return self._drawn(self._processed(logits.double(), ahead.in_window()), ahead)

    def _drawn(self, filtered: torch.Tensor, ahead: Ahead) -> list[torch.Tensor]:
        scores = self._perturbed(filtered, ahead)
        best = scores.amax(-1, keepdim=True)
        token = first_argmax(scores, best)[None]
        told = [token, best]
        if self.logprobs is not None:
            told.append(filtered.log_softmax(-1).index_select(0, token))
        return told

    def settle(self, token: float, score: float, logprob: float | None = None) -> int:
        """Append a token that was drawn to the text.

        Raises:
            ValueError: the score tells that there was none to draw.
        """
        if not score > -math.inf:
            if math.isnan(score):
                raise ValueError("the logits hold NaN: the model's dtype overflows, or logits_hook returned it")
            raise ValueError("no token is left to choose from: suppress_tokens or logits_hook forbid all of them")
        if self.logprobs is not None:
            self.logprobs.append(logprob)
        self.push(int(token))
        return int(token)

    def take(self, token: int, filtered: torch.Tensor) -> None:
        """Append a token that was drawn from ``filtered`` [V] to the text."""
        if self.logprobs is not None:
            self.logprobs.append(float(filtered.log_softmax(-1)[token]))
        self.push(token)

    def push(self, token: int) -> None:
        """Append a token to the text."""
        self.context.append(token)
        self._window.push(token)

    def draft_scores(self, logits: torch.Tensor, coupled: bool, ahead: Ahead) -> torch.Tensor:
        """Scores to rank draft candidates by, float64 [n, V], for the logits of the next n positions.

        Coupled (Gumbel coupling, arXiv 2408.07978): log q plus the very noise that will choose the target's token.
        All rows see the window of the first.
        """
        filtered = self._processed(logits.double(), ahead.in_window())
        return filtered if self.params.greedy or not coupled else filtered + ahead.noise(len(logits))

    def branch_scores(self, logits: torch.Tensor, coupled: bool, ahead: Ahead, drafted: torch.Tensor) -> torch.Tensor:
        """`draft_scores` for the position behind n branches of equal length: float32 [n, V] for logits [n, V].

        The branches part where ``ahead`` is. Row i sees the window with ``drafted[i]`` in it, int64 [n, length]; that
        as many old tokens leave it is passed over, and single precision is enough where a wrong rank only costs a
        draft.
        """
        seen, length = ahead.in_window(), drafted.shape[1]
        if seen is not None and length:
            seen = seen.expand(len(drafted), -1).scatter(1, drafted, True)
        filtered = self._processed(logits.float(), seen)
        return filtered if self.params.greedy or not coupled else filtered + ahead.noise(1, skip=length)[0].float()

    def draft_choice(self, logits: torch.Tensor, coupled: bool, drafted: Sequence[int]) -> int:
        """The best candidate for the position behind ``drafted``, from its logits [V]."""
        return int(first_argmax(self.draft_scores(logits[None], coupled, self.ahead(drafted))[0]))
