import pytest
import torch
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from heads_train import chunked_cross_entropy
from heads_train.metrics import TopKAccuracy, top_k_accuracy


@pytest.fixture
def case():
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(50, 16, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    return hidden, weight, bias, torch.randint(0, 50, (37,))


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 512])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_loss_and_gradient_equal_the_naive_ones(case, chunk_tokens, with_bias):
    hidden, weight, bias, targets = case
    bias = bias if with_bias else None
    naive = F.cross_entropy(F.linear(hidden, weight, bias), targets)
    (naive_grad,) = torch.autograd.grad(3.0 * naive, hidden)
    loss, _ = chunked_cross_entropy(hidden, weight, targets, bias, chunk_tokens)
    (grad,) = torch.autograd.grad(3.0 * loss, hidden)
    assert torch.allclose(loss, naive, rtol=0, atol=1e-9)
    assert torch.allclose(grad, naive_grad, rtol=0, atol=1e-9)


def test_loss_in_bf16_stays_near_the_float64_loss(case):
    hidden, weight, _, targets = case
    exact = F.cross_entropy(hidden @ weight.T, targets)
    loss, _ = chunked_cross_entropy(hidden.float(), weight.bfloat16(), targets, chunk_tokens=8)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 0.02 * exact.item()


def test_ranks_count_the_likelier_tokens(case):
    hidden, weight, _, targets = case
    order = (hidden @ weight.T).argsort(-1, descending=True)
    expected = (order == targets[:, None]).int().argmax(-1)
    _, ranks = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=8, with_ranks=True)
    assert torch.equal(ranks, expected)


def test_top_k_accuracy_equals_torchmetrics(case):
    hidden, weight, _, targets = case
    logits = hidden @ weight.T
    _, ranks = chunked_cross_entropy(hidden, weight, targets, with_ranks=True)
    metric = TopKAccuracy(3)
    metric.update(ranks[:10])
    metric.update(ranks[10:])
    for k, share in enumerate(metric.compute(), start=1):
        reference = MulticlassAccuracy(50, top_k=k, average="micro")(logits, targets)
        assert share.item() == pytest.approx(reference.item())
        assert top_k_accuracy(ranks, k).item() == pytest.approx(reference.item())
