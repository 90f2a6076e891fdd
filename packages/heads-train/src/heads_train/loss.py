"""Losses behind a frozen language-model head, without the [tokens, vocabulary] matrix of a whole sequence."""

import warnings
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear

Objective = Literal["tokens", "distribution", "overlap"]


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradient chunk by chunk in one pass: the gradient exists before a chunk's logits are dropped."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, teacher, objective, chunk_tokens, ranked, log_sums):
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        grad = torch.empty_like(hidden) if hidden.requires_grad else None
        ranks = None if ranked is None else torch.empty_like(ranked)
        overlap = None if teacher is None else total.new_zeros(len(targets))
        soft = objective != "tokens"
        counted = len(targets) if soft else (targets >= 0).sum().clamp_min(1)
        for begin in range(0, len(targets), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            known = targets[part, None] >= 0
            target = targets[part, None].clamp_min(0)
            logits = linear(hidden[part].to(weight.dtype), weight, bias)
            if soft and grad is not None and ranked is None and log_sums is None and logits.is_cuda:
                wanted = linear(teacher[part].to(weight.dtype), weight, bias)
                losses, overlap[part], error = _in_one_kernel(logits, wanted, objective, total.dtype)
                total += losses.sum()
                grad[part] = error @ weight
                continue
            log_probs = logits.log_softmax(-1, dtype=total.dtype)
            own = log_probs.gather(-1, target)
            for row, tokens in enumerate(() if ranked is None else ranked[:, part]):
                likelier = (log_probs > log_probs.gather(-1, tokens[:, None].clamp_min(0))).sum(-1)
                ranks[row, part] = torch.where(tokens >= 0, likelier, len(weight))
            if teacher is not None:
                wanted = linear(teacher[part].to(weight.dtype), weight, bias)
                # Of the whole vocabulary where its log-sum-exp is given; renormalised over these rows else.
                p = None if log_sums is None else (wanted.to(total.dtype) - log_sums[part, None]).exp()
                wanted = wanted.softmax(-1, dtype=total.dtype) if p is None or soft else None
            if objective != "overlap":
                total -= (wanted * log_probs).sum() if soft else own[known].sum()
            probs = log_probs.exp_()
            if teacher is not None:
                overlap[part] = torch.minimum(wanted if p is None else p, probs).sum(-1)
            if objective == "overlap":
                common = overlap[part, None] if p is None else torch.minimum(wanted, probs).sum(-1, keepdim=True)
                common = common.clamp_min(torch.finfo(common.dtype).tiny)  # where they have nothing at all in common
                total -= common.log().sum()
            if grad is not None:
                if objective == "overlap":
                    # Only where q is the smaller one does the overlap change with it.
                    rising = probs.where(probs < wanted, 0)
                    error = probs.mul_(rising.sum(-1, keepdim=True)).sub_(rising).div_(common)
                elif soft:
                    error = probs.sub_(wanted)
                else:
                    error = probs.scatter_add_(-1, target, torch.full_like(own, -1.0)).mul_(known)
                grad[part] = error.to(weight.dtype) @ weight
        ctx.save_for_backward(grad, counted if torch.is_tensor(counted) else torch.tensor(counted))
        ctx.mark_non_differentiable(*(one for one in (ranks, overlap) if one is not None))
        return total / counted, ranks, overlap

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad, counted = ctx.saved_tensors
        return grad * (grad_loss / counted.to(grad_loss.device)).to(grad.dtype), *[None] * 8


def soft_terms(
    logits: Tensor, wanted: Tensor, objective: Objective, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``logits`` [n, v] and the teacher's, ``wanted``: losses [n], overlaps [n], gradients of the losses [n, v].

    What `chunked_loss` computes of each chunk for its two soft objectives, in one expression for a compiler.
    """
    log_probs, p = logits.log_softmax(-1, dtype=dtype), wanted.softmax(-1, dtype=dtype)
    probs = log_probs.exp()
    overlap = torch.minimum(p, probs).sum(-1)
    if objective == "distribution":
        return -(p * log_probs).sum(-1), overlap, (probs - p).to(logits.dtype)
    common = overlap.clamp_min(torch.finfo(dtype).tiny)
    rising = torch.where(probs < p, probs, 0)
    error = (probs * rising.sum(-1, keepdim=True) - rising) / common[:, None]
    return -common.log(), overlap, error.to(logits.dtype)


def compiled(function: Callable) -> Callable:
    """``function`` by PyTorch's compiler, and as it is from the first call on that this cannot compile.

    It needs a C compiler, and nothing else of training does.
    """
    run: Callable | None = None

    def call(*given):
        nonlocal run
        if run is None:
            run = torch.compile(function, dynamic=True)  # whose import takes a second
        try:
            return run(*given)
        except Exception as error:
            if run is function or isinstance(error, torch.OutOfMemoryError):
                raise
            warnings.warn(f"slower without PyTorch's compiler: {type(error).__name__}", stacklevel=2)
            run = function
            return run(*given)

    return call


# A GPU reads and writes the logits some thirty times else, which takes it longer than the products.
_in_one_kernel = compiled(soft_terms)


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    chunk_tokens: int = 512,
    ranked: Tensor | None = None,
    teacher: Tensor | None = None,
    objective: Objective = "tokens",
    log_sums: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mean loss, in nats per token, of ``hidden @ weight.T + bias`` against ``targets``.

    ``hidden`` [n, d], ``weight`` [vocabulary, d] and ``bias`` [vocabulary] of the frozen language-model head (no
    gradient flows to them), ``targets`` [n] token ids. At most ``chunk_tokens`` x vocabulary logits exist at a
    time. With the objective ``tokens``, value and gradient are those of ``torch.nn.functional.cross_entropy`` on all
    logits. The matrix products run in the dtype of ``weight``, the softmax in float32 or wider.

    ``teacher`` [n, d] are states that the same head turns into the model's own distributions p. With the objective
    ``distribution`` these take the targets' place in the loss, -sum p log q. With ``overlap`` the loss is -log sum
    min(p, q) (LK losses, arXiv 2602.23881): the overlap tells how often drafts are right, where cross entropy spends
    much of what small heads can hold on tokens that are hardly ever drawn.

    With a draft vocabulary ``weight`` and ``bias`` are its rows alone, ``targets`` count among them, and -1 is one that
    is none of them: it counts in no mean of the loss. The other objectives then learn p renormalised over the draft
    vocabulary; ``log_sums`` [n], the log-sum-exp of the teacher's logits over the whole vocabulary, makes the overlap
    that is returned the one with p itself.

    Also returns the ranks of tokens ``ranked`` [rows, n], which count as the targets do: how many tokens have a larger
    logit (0: the token is top-1; as many as there are tokens: it is none of them); and with a teacher the overlaps [n],
    sum min(p, q), which are 1 - the total variation between the two.
    """
    if objective not in get_args(Objective):
        raise ValueError(f"unknown objective {objective!r}; known ones are {', '.join(get_args(Objective))}")
    if objective != "tokens" and teacher is None:
        raise ValueError(f"objective {objective} needs the teacher's states")
    return _ChunkedLoss.apply(hidden, weight, bias, targets, teacher, objective, chunk_tokens, ranked, log_sums)


@torch.no_grad()
def over_vocabulary(
    states: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor | None, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the logits of ``states`` [n, d]: their log-sum-exp [n], the likeliest token [n], and the probability [n] of
    the tokens ``chosen`` [v] together, 1 for None, which is all of them."""
    found = []
    for part in states.split(chunk_tokens):
        logits = linear(part.to(weight.dtype), weight, bias).to(torch.promote_types(part.dtype, torch.float32))
        sums = logits.logsumexp(-1)
        covered = torch.ones_like(sums) if chosen is None else (logits[:, chosen].logsumexp(-1) - sums).exp()
        found.append((sums, logits.argmax(-1), covered))
    sums, likeliest, covered = (torch.cat(column) for column in zip(*found, strict=True))
    return sums, likeliest, covered
