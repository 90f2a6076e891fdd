"""Cross entropy of a frozen language-model head, without the [tokens, vocabulary] matrix of a whole sequence."""

import torch
from torch import Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and gradient chunk by chunk in one pass: the gradient exists before a chunk's logits are dropped."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, chunk_tokens, with_ranks):
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        grad = torch.empty_like(hidden) if hidden.requires_grad else None
        ranks = torch.empty_like(targets) if with_ranks else None
        for begin in range(0, len(targets), chunk_tokens):
            part = slice(begin, begin + chunk_tokens)
            target = targets[part, None]
            logits = torch.nn.functional.linear(hidden[part].to(weight.dtype), weight, bias)
            log_probs = logits.log_softmax(-1, dtype=total.dtype)
            own = log_probs.gather(-1, target)
            total -= own.sum()
            if with_ranks:
                ranks[part] = (log_probs > own).sum(-1)
            if grad is not None:
                error = log_probs.exp_().scatter_add_(-1, target, torch.full_like(own, -1.0))
                grad[part] = error.to(weight.dtype) @ weight
        ctx.save_for_backward(grad, targets)
        if with_ranks:
            ctx.mark_non_differentiable(ranks)
        return total / len(targets), ranks

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad, targets = ctx.saved_tensors
        return grad * (grad_loss / len(targets)).to(grad.dtype), None, None, None, None, None


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    chunk_tokens: int = 512,
    with_ranks: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Mean cross entropy, in nats per token, of ``hidden @ weight.T + bias`` against ``targets``.

    ``hidden`` [n, d], ``weight`` [vocabulary, d] and ``bias`` [vocabulary] of the frozen language-model head (no
    gradient flows to them), ``targets`` [n] token ids. At most ``chunk_tokens`` x vocabulary logits exist at a
    time. Value and gradient are those of ``torch.nn.functional.cross_entropy`` on all logits. The matrix products
    run in the dtype of ``weight``, the softmax in float32 or wider.

    Also returns, if asked, each target's rank [n]: how many tokens have a larger logit (0: the target is top-1).
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, chunk_tokens, with_ranks)
