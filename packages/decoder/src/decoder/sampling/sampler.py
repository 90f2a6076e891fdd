"""Where a token is chosen from the logits of a position: by penalty, filters and noise, in the same way everywhere."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from decoder.backends.transfers import download, on_host, upload
from decoder.constraints.base import ConstraintError, Vocabulary
from decoder.sampling.conditions import Conditions, Restriction
from decoder.sampling.constraint_path import ConstraintPath
from decoder.sampling.draft_context import DraftContext
from decoder.sampling.filters import first_argmax, highest, highest_of, of_size, process_logits
from decoder.sampling.host_rows import without
from decoder.sampling.native_choice import NativeChoice, no_choice
from decoder.sampling.noise import NoiseRows
from decoder.sampling.params import SamplingParams
from decoder.sampling.penalty_window import PenaltyWindow
from decoder.timings import stage

_ENDLESS = 2**62  # the size of a window that no token leaves

LogitsHook = Callable[[list[int], torch.Tensor], torch.Tensor]


class Drawn(NamedTuple):
    """A token drawn at a node of a tree, which enters the sequence only if the walk comes to that node.

    Attributes:
        token: its id.
        score: its log-probability, with noise or without; NaN or -inf if there was no token to draw.
        logprob: its log-probability under the filtered distribution; None if these were not asked for.
        top_logprobs: the most likely tokens there, as (id, log-probability); None if these were not asked for.
    """

    token: int
    score: float
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None


class Sampler:
    """Chooses the tokens of one sequence, and ranks drafts for it: it has the sequence's penalty window and its noise.

    Args:
        params: the user's sampling parameters.
        vocab_size: V, the number of logits per position.
        device: the device of the logits.
        context: the token ids of the prompt.
        logits_hook: ``hook(context_ids, logits [V]) -> logits [V]``, applied before the penalty.
        collect_logprobs: whether to collect the log-probability of every chosen token in ``logprobs``.
        collect_top_logprobs: how many of the most likely tokens to collect at every position in ``top_logprobs``.
        choice: what chooses tokens by given parameters faster than operators do, and chooses the same; it may have
            nothing for some.
        vocabulary: the sequence's vocabulary, for parameters that need more of it than its size.

    Attributes:
        context: the token ids of the sequence so far, prompt and output.
        logprobs: the log-probabilities of the output's tokens, if they are collected.
        top_logprobs: the most likely tokens at the positions of the output, as in `GenerationOutput`, if they are
            collected.
        draft_params: what drafts of heads are ranked with.
        native: the library's choice of the target's tokens; None where PyTorch's operators choose.
        native_drafts: the same for drafts of heads.
        output: the tokens of the output as a window that holds them all; of size 0 where they do not matter.

    Raises:
        ValueError: parameters name tokens outside the vocabulary, or suppress all of it; or the constraint does not fit
            the vocabulary, or the output that goes on.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        device: torch.device,
        context: Sequence[int],
        logits_hook: LogitsHook | None = None,
        collect_logprobs: bool = False,
        collect_top_logprobs: int = 0,
        choice: "Callable[..., NativeChoice | None]" = no_choice,
        vocabulary: Vocabulary | None = None,
    ):
        self.params, self.logits_hook, self._vocab_size = params, logits_hook, vocab_size
        self.context = list(context)
        self.logprobs: list[float] | None = [] if collect_logprobs else None
        self.top_logprobs: list[list[tuple[int, float]]] | None = [] if collect_top_logprobs else None
        self._most_likely = collect_top_logprobs
        self.noise = NoiseRows(params.seed, vocab_size, device)
        self.draft_params = params.for_weak_drafts()
        outside = next((token for token in params.suppress_tokens if token >= vocab_size), None)
        if outside is not None:
            raise ValueError(f"suppress_tokens has {outside}, which is outside the vocabulary of {vocab_size}")
        if len(set(params.suppress_tokens)) == vocab_size:
            raise ValueError("suppress_tokens forbids the whole vocabulary: leave at least one token")
        self._suppressed = upload(params.suppress_tokens, device) if params.suppress_tokens else None
        self.window = PenaltyWindow(params.window, vocab_size, device, self.context)
        self._prompt_tokens = max(0, len(self.context) - params.continued_tokens)
        output = self.context[self._prompt_tokens :]
        self.output = PenaltyWindow(_ENDLESS if params.counts_output else 0, vocab_size, device, output)
        self._bias = _bias(params, vocab_size, device)
        self.native = choice(params, bias=self._bias) if logits_hook is None else None
        self._noised = choice(SamplingParams(seed=params.seed))  # for what operators have filtered
        free = not params.restricts and self._suppressed is None
        self.native_drafts = choice(self.draft_params, bias=self._bias) if free else None
        self._tells_output = bool(params.bad_words or params.min_tokens)
        self._restriction: Restriction | None = None
        if params.restricts:
            self._restriction = Restriction(params, vocabulary or Vocabulary(vocab_size), device, output)

    @property
    def constraint(self) -> ConstraintPath | None:
        """Where the sequence stands in its constraint, if it has one."""
        return None if self._restriction is None else self._restriction.path

    @property
    def draws_whole_trees(self) -> bool:
        """Whether `TreeDraws` can draw the tokens of all nodes of a tree at once."""
        return self.logits_hook is None and self._restriction is None and not self.params.counts_output

    @property
    def finished(self) -> bool:
        """Whether the constraint ends the sequence here, where no token does."""
        return self.constraint is not None and self.constraint.finished

    @property
    def collects(self) -> bool:
        """Whether log-probabilities are collected, of the tokens or of the most likely ones."""
        return self.logprobs is not None or self.top_logprobs is not None

    def draft_context(self, drafted: Sequence[int] = ()) -> DraftContext:
        """The state that drafts are ranked with, where the sequence goes on with ``drafted``."""
        allowed = None if self._restriction is None else self.allowed
        context = DraftContext(self.window, self.noise, self.context, self.output, allowed)
        for token in drafted:
            context.push(token)
        return context

    def allowed(self, drafted: Sequence[int] = ()) -> torch.Tensor | None:
        """The tokens that may follow ``drafted``, bool [V]; None where all may, or the drafts themselves may not.

        Raises:
            ValueError: the constraint cannot tell.
        """
        if self._restriction is None:
            return None
        path = self._restriction.path
        node = None if path is None else path.find(drafted)
        output = [*self.context[self._prompt_tokens :], *drafted] if self._tells_output else ()
        return self._restriction.allowed(output, node)

    def _conditions(self, drafted: Sequence[int] = ()) -> Conditions:
        """Those of a node of a tree, of which penalties are those of the sequence alone."""
        return Conditions(*self.penalties(), self.allowed(drafted))

    def penalties(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The tokens of the penalty window, bool [V], and how often the output has each, int32 [V], if used."""
        return self.window.penalised, self.output.counts if self.output.size else None

    def filtered(self, logits: torch.Tensor, drafted: Sequence[int] = ()) -> torch.Tensor:
        """The target's logits [V] after hook, penalty and filters: unnormalised log-probabilities, float64 [V].

        The hook is given the sequence with ``drafted`` behind it. The penalty window is that of the sequence alone.
        """
        if self.logits_hook is not None:
            shape = logits.shape
            # A copy, since the hook may store or change them, and the next pass may write over the model's output.
            logits = self.logits_hook([*self.context, *drafted], logits.clone())
            if not isinstance(logits, torch.Tensor) or logits.shape != shape:
                raise ValueError(f"logits_hook must return a tensor of the shape it was given, {list(shape)}")
        return self.processed(logits.double(), self._conditions(drafted))

    def processed(
        self,
        logits: torch.Tensor,
        conditions: Conditions,
        token_ids: torch.Tensor | None = None,
        params: SamplingParams | None = None,
    ) -> torch.Tensor:
        """Logits [..., V], of the target or a draft, after bans, bias, penalties and filters; the dtype is the same.

        If ``token_ids`` [v] are given, the logits [..., v] are those of these tokens alone. ``params`` are the user's
        if none are given.
        """
        if self._suppressed is not None and token_ids is None:
            logits = logits.index_fill(-1, self._suppressed, -torch.inf)
        elif self._suppressed is not None:
            logits = logits.masked_fill(torch.isin(token_ids, self._suppressed), -torch.inf)
        if token_ids is not None:
            conditions = conditions.of_tokens(token_ids)
        in_window, counts, allowed = conditions
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        if self._bias is not None:
            bias = self._bias.to(logits.dtype)
            logits = logits + (bias if token_ids is None else bias.index_select(0, token_ids))
        return process_logits(logits, params or self.params, in_window, counts)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """The filtered logits of the next position plus its noise, float64 [V]: their argmax is the chosen token."""
        return self._perturbed(self.filtered(logits))

    def _perturbed(self, filtered: torch.Tensor) -> torch.Tensor:
        return filtered if self.params.greedy else filtered + self.noise.rows(len(self.context), 1)[0]

    @stage("sampling")
    def draw(self, logits: torch.Tensor) -> Drawn:
        """Choose the token of the next position from the target's logits [V]; the host waits for it.

        The native library does where it knows all of the parameters. Else operators filter, and the library finds the
        highest with its noise, if it is there; on a device operators do that, too.
        """
        position = len(self.context)
        found = None
        if self.native is not None:
            # What may not follow is ruled out before, which changes no other number.
            left = self._ruled_out(logits, self.allowed())
            found = self.native.highest(left, position, *self.penalties())
            if found is not None and not self.collects:
                return Drawn(*found)
            if found is not None and (drawn := self._described(left, *found)) is not None:
                return drawn
        filtered = self.filtered(logits)
        if found is None and on_host(filtered):
            if self._noised is not None and not self.params.greedy:
                found = self._noised.highest_with_noise(filtered, position)
            found = found or highest_of(self._perturbed(filtered).numpy(force=True))
        if found is not None:
            return self.chosen(filtered, *found)
        scores = self._perturbed(filtered)
        best = scores.amax(-1, keepdim=True)
        chosen = first_argmax(scores, best)[None]
        return self.drawn(*download(torch.cat([chosen, best, *self.collected(filtered[None], chosen)])))

    def _ruled_out(self, logits: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """Logits [V], on the host, with -inf for tokens that may not be chosen."""
        if allowed is None and self._suppressed is None:
            return logits
        return without(logits, allowed, self._suppressed)

    def _described(self, logits: torch.Tensor, token: int, score: float) -> Drawn | None:
        """What the library has drawn from logits [V], with what is collected; None where it leaves that to others."""
        assert self.native is not None
        found = self.native.log_probabilities(logits, token, *self.penalties(), self._most_likely)
        if found is None:
            return None
        logprob, likely = found
        return Drawn(
            token,
            score,
            None if self.logprobs is None else logprob,
            None if self.top_logprobs is None else likely,
        )

    def collected(self, filtered: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        """What is collected of T distributions ``filtered`` [T, V] and the ``tokens`` [T] chosen from them.

        Returns:
            The numbers that `drawn` takes behind token and score, float64 [T] each: the log-probability of the token,
            then the ids of the most likely tokens, then their log-probabilities. Those that are not collected are left
            out.
        """
        if not self.collects:
            return []
        logprobs = filtered.log_softmax(-1)
        columns = [] if self.logprobs is None else [logprobs.gather(-1, tokens[:, None])[:, 0]]
        if self.top_logprobs is not None:
            # Ranked before they are normalised, which may round two scores to one.
            ids = highest(filtered, self._most_likely)
            columns += [*ids.double().unbind(-1), *logprobs.gather(-1, ids).unbind(-1)]
        return columns

    def drawn(self, token: float, score: float, *collected: float) -> Drawn:
        """The drawn token of these numbers; ``collected`` are those of `collected` in their order."""
        own = 0 if self.logprobs is None else 1
        logprob = collected[0] if own else None
        if self.top_logprobs is None:
            return Drawn(int(token), score, logprob)
        ids, values = collected[own : own + self._most_likely], collected[own + self._most_likely :]
        likely = [(int(one), value) for one, value in zip(ids, values, strict=True) if value > -math.inf]
        return Drawn(int(token), score, logprob, likely)

    def chosen(self, filtered: torch.Tensor, token: int, score: float) -> Drawn:
        """The drawn token, where the host knows which one was chosen from the distribution ``filtered`` [V]."""
        if not self.collects:
            return Drawn(token, score)
        columns = self.collected(filtered[None], upload([token], filtered.device))
        return self.drawn(token, score, *download(torch.cat(columns)))

    def take(self, drawn: Drawn) -> int:
        """Append a drawn token to the sequence, and what is collected to ``logprobs`` and ``top_logprobs``.

        Raises:
            ConstraintError: there was no token to draw.
            ValueError: the logits hold NaN.
        """
        if not drawn.score > -math.inf:
            if math.isnan(drawn.score):
                raise ValueError("the logits hold NaN: the model's dtype overflows, or logits_hook returned it")
            raise ConstraintError(
                "no token is left to choose from: suppress_tokens, bad_words, the constraint or logits_hook forbid "
                "all of them"
            )
        if self.logprobs is not None:
            self.logprobs.append(drawn.logprob)
        if self.top_logprobs is not None:
            self.top_logprobs.append(drawn.top_logprobs)
        self.push(drawn.token)
        return drawn.token

    def push(self, token: int) -> None:
        """Append a token to the sequence."""
        self.context.append(token)
        self.window.push(token)
        self.output.push(token)
        if self.constraint is not None:
            self.constraint.push(token)

    @stage("scoring")
    def draft_scores(
        self,
        logits: torch.Tensor,
        coupled: bool,
        context: DraftContext,
        token_ids: torch.Tensor | None = None,
        skip: int = 0,
        weak: bool = False,
    ) -> torch.Tensor:
        """Scores to rank draft candidates by, float64 [n, V], from a draft's logits [n, V] for n positions in a row.

        With coupling (Gumbel coupling, arXiv 2408.07978) a score is log q plus the same noise with which the target's
        token will be chosen, without it log q alone. The penalty window of the first position serves all of them.

        Args:
            context: the sequence with the tokens drafted so far.
            token_ids: as for `processed`.
            skip: how many positions lie between the end of ``context`` and the first row.
            weak: whether they are of heads and not of the model itself, see `SamplingParams.for_weak_drafts`.
        """
        params = self.draft_params if weak else self.params
        conditions = context.conditions()
        if conditions.allowed is not None and (skip or len(logits) > 1):
            # What may follow tokens that are not drafted yet is not known.
            allowed = conditions.allowed.new_ones(len(logits), len(conditions.allowed))
            if not skip:
                allowed[0] = conditions.allowed
            conditions = conditions._replace(allowed=allowed)
        filtered = self.processed(logits.double(), conditions, token_ids, params)
        if self.params.greedy or not coupled:
            return filtered
        return filtered + context.noise(len(logits), skip, token_ids)

    @stage("scoring")
    def branch_scores(
        self,
        logits: torch.Tensor,
        coupled: bool,
        context: DraftContext,
        drafted: torch.Tensor,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`draft_scores` of heads for the position behind each of n branches of equal length: float32 [n, V].

        All branches begin where ``context`` ends, and row i of the logits [n, V] follows ``drafted[i]``, int64 [n,
        length]. Two approximations are made, since a wrong rank can only cost a draft: tokens of the branch enter the
        penalty window but none leaves it, and single precision is used. ``token_ids`` are as for `processed`.
        """
        (seen, counts, allowed), length = context.conditions(), drafted.shape[1]
        if seen is not None and length:
            seen = seen.expand(len(drafted), -1).scatter(1, drafted, True)
        if counts is not None and length:
            counts = counts.repeat(len(drafted), 1).scatter_add_(
                1, drafted, torch.ones_like(drafted, dtype=counts.dtype)
            )
        if allowed is not None and length:
            rows = [context.allowed(row) for row in drafted.tolist()]
            allowed = torch.stack([torch.ones_like(allowed) if row is None else row for row in rows])
        filtered = self.processed(logits.float(), Conditions(seen, counts, allowed), token_ids, self.draft_params)
        if self.params.greedy or not coupled:
            return filtered
        return filtered + context.noise(1, length, token_ids)[0].float()

    @stage("scoring")
    def best_drafts(
        self, logits: torch.Tensor, coupled: bool, context: DraftContext, width: int
    ) -> list[tuple[int, float]]:
        """The ``width`` best candidates by a draft's logits [v] behind ``context``, by `draft_scores`, with scores.

        A draft model's vocabulary may be padded to another size. Where the native library ranks candidates, scores are
        rounded, and a tie in single precision can turn their order.
        """
        logits = of_size(logits, self._vocab_size)
        if self.native is not None:
            do_sample = coupled and not self.params.greedy
            in_window, counts, allowed = context.conditions()
            left = self._ruled_out(logits, allowed)
            return self.native.best_drafts(left, context.position, in_window, counts, do_sample, width)
        scores, tokens = self.draft_scores(logits[None], coupled, context)[0].topk(width)
        numbers = torch.cat((scores, tokens.double())).tolist()
        return list(zip(map(int, numbers[width:]), numbers[:width], strict=True))

    @stage("scoring")
    def draft_choice(self, logits: torch.Tensor, coupled: bool, context: DraftContext) -> torch.Tensor:
        """The best candidate for the position behind ``context``, int64 [1], from a draft's logits [v] for it."""
        if self.native is not None and on_host(logits):
            [(token, _)] = self.best_drafts(logits, coupled, context, 1)
            return upload([token], logits.device)
        return first_argmax(self.draft_scores(of_size(logits, self._vocab_size)[None], coupled, context))


def _bias(params: SamplingParams, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """What is added to logits, float64 [V]; None where nothing is."""
    if params.logit_bias is None:
        return None
    ids, values = zip(*params.logit_bias, strict=True)
    outside = next((token for token in ids if token >= vocab_size), None)
    if outside is not None:
        raise ValueError(f"logit_bias has {outside}, which is outside the vocabulary of {vocab_size}")
    bias = torch.zeros(vocab_size, dtype=torch.float64)
    bias[list(ids)] = torch.tensor(values, dtype=torch.float64)
    return bias.to(device)
