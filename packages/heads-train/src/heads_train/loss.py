"""Cross entropy of a frozen language-model head, without the [tokens, vocabulary] matrix of a whole sequence."""

import torch
from torch import Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradient chunk by chunk in one pass: the gradient exists before a chunk's logits are dropped."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, teacher, soft, chunk_tokens, with_ranks):
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        grad = torch.empty_like(hidden) if hidden.requires_grad else None
        ranks = torch.empty_like(targets) if with_ranks else None
        overlap = torch.zeros_like(total)
        for begin in range(0, len(targets), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            target = targets[part, None]
            logits = torch.nn.functional.linear(hidden[part].to(weight.dtype), weight, bias)
            log_probs = logits.log_softmax(-1, dtype=total.dtype)
            own = log_probs.gather(-1, target)
            if with_ranks:
                ranks[part] = (log_probs > own).sum(-1)
            if teacher is not None:
                wanted = torch.nn.functional.linear(teacher[part].to(weight.dtype), weight, bias)
                wanted = wanted.softmax(-1, dtype=total.dtype)
            total -= (wanted * log_probs).sum() if soft else own.sum()
            probs = log_probs.exp_()
            if teacher is not None:
                overlap += torch.minimum(wanted, probs).sum()
            if grad is not None:
                error = probs.sub_(wanted) if soft else probs.scatter_add_(-1, target, torch.full_like(own, -1.0))
                grad[part] = error.to(weight.dtype) @ weight
        ctx.save_for_backward(grad, targets)
        if with_ranks:
            ctx.mark_non_differentiable(ranks)
        ctx.mark_non_differentiable(overlap)
        return total / len(targets), ranks, overlap.div_(len(targets)) if teacher is not None else None

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad, targets = ctx.saved_tensors
        return grad * (grad_loss / len(targets)).to(grad.dtype), *[None] * 7


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    chunk_tokens: int = 512,
    with_ranks: bool = False,
    teacher: Tensor | None = None,
    soft: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mean cross entropy, in nats per token, of ``hidden @ weight.T + bias`` against ``targets``.

    ``hidden`` [n, d], ``weight`` [vocabulary, d] and ``bias`` [vocabulary] of the frozen language-model head (no
    gradient flows to them), ``targets`` [n] token ids. At most ``chunk_tokens`` x vocabulary logits exist at a
    time. Value and gradient are those of ``torch.nn.functional.cross_entropy`` on all logits. The matrix products
    run in the dtype of ``weight``, the softmax in float32 or wider.

    ``teacher`` [n, d] are states that the same head turns into the model's own distributions p; with ``soft`` these
    take the targets' place in the loss, -sum p log q.

    Also returns, if asked, each target's rank [n]: how many tokens have a larger logit (0: the target is top-1); and
    with a teacher the mean overlap sum min(p, q), which is 1 - the total variation between the two.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, teacher, soft, chunk_tokens, with_ranks)
