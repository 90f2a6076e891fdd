import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from heads_train import chunked_loss, loss
from heads_train.draft_vocabulary import expected_counts, most_expected
from heads_train.loss import over_vocabulary, soft_terms
from heads_train.metrics import TokensPerStep, TopKAccuracy, top_k_accuracy


@pytest.fixture
def case():
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(50, 16, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    return hidden, weight, bias, torch.randint(0, 50, (37,))


def naive_loss(hidden, weight, targets, bias):
    return F.cross_entropy(F.linear(hidden, weight, bias), targets)


def torchs_own_loss(hidden, weight, targets, bias):
    return F.linear_cross_entropy(hidden, weight, targets, linear_bias=bias)


# torch has its own since 2.13.
REFEREES = [naive_loss, torchs_own_loss] if hasattr(F, "linear_cross_entropy") else [naive_loss]


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 512])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("referee", REFEREES)
def test_chunked_loss_and_gradient_equal_the_referees(case, chunk_tokens, with_bias, referee):
    hidden, weight, bias, targets = case
    bias = bias if with_bias else None
    naive = referee(hidden, weight, targets, bias)
    (naive_grad,) = torch.autograd.grad(3.0 * naive, hidden)
    loss, _, _ = chunked_loss(hidden, weight, targets, bias, chunk_tokens)
    (grad,) = torch.autograd.grad(3.0 * loss, hidden)
    assert torch.allclose(loss, naive, rtol=0, atol=1e-9)
    assert torch.allclose(grad, naive_grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("chunk_tokens", [1, 8, 512])
def test_distilling_loss_gradient_and_overlap_equal_torchs(case, chunk_tokens):
    """Against cross entropy with probabilities for targets, and against the total variation written out."""
    hidden, weight, bias, targets = case
    teacher = torch.randn(37, 16, dtype=torch.float64)
    wanted = F.linear(teacher, weight, bias).softmax(-1)
    logits = F.linear(hidden, weight, bias)
    naive = F.cross_entropy(logits, wanted)
    (naive_grad,) = torch.autograd.grad(3.0 * naive, hidden, retain_graph=True)
    loss, _, overlap = chunked_loss(
        hidden, weight, targets, bias, chunk_tokens, teacher=teacher, objective="distribution"
    )
    (grad,) = torch.autograd.grad(3.0 * loss, hidden)
    assert torch.allclose(loss, naive, rtol=0, atol=1e-9)
    assert torch.allclose(grad, naive_grad, rtol=0, atol=1e-9)
    variation = (logits.softmax(-1) - wanted).abs().sum(-1) / 2
    assert torch.allclose(overlap, 1 - variation, rtol=0, atol=1e-9)
    hard, ranks, same = chunked_loss(hidden, weight, targets, bias, chunk_tokens, targets[None], teacher)
    assert torch.allclose(hard, naive_loss(hidden, weight, targets, bias), rtol=0, atol=1e-9)
    assert torch.allclose(same, overlap) and ranks.shape == (1, 37)


@pytest.mark.parametrize("chunk_tokens", [1, 8, 512])
def test_overlap_loss_and_gradient_equal_autograds(case, chunk_tokens):
    hidden, weight, bias, targets = case
    teacher = torch.randn(37, 16, dtype=torch.float64)
    wanted = F.linear(teacher, weight, bias).softmax(-1)
    common = torch.minimum(F.linear(hidden, weight, bias).softmax(-1), wanted).sum(-1)
    naive = -common.log().mean()
    (naive_grad,) = torch.autograd.grad(3.0 * naive, hidden)
    loss, _, overlap = chunked_loss(hidden, weight, targets, bias, chunk_tokens, teacher=teacher, objective="overlap")
    (grad,) = torch.autograd.grad(3.0 * loss, hidden)
    assert torch.allclose(loss, naive, rtol=0, atol=1e-9)
    assert torch.allclose(grad, naive_grad, rtol=0, atol=1e-9)
    assert torch.allclose(overlap, common, rtol=0, atol=1e-9)


@pytest.mark.parametrize("objective", ["distribution", "overlap"])
def test_the_expression_for_a_compiler_is_what_the_chunks_compute(case, objective):
    """On a GPU the whole chunk is one compiled expression; here the same expression beside the steps in place."""
    hidden, weight, bias, targets = case
    teacher = torch.randn(37, 16, dtype=torch.float64)
    loss, _, overlap = chunked_loss(hidden, weight, targets, bias, teacher=teacher, objective=objective)
    (grad,) = torch.autograd.grad(loss, hidden)
    logits, wanted = F.linear(hidden.detach(), weight, bias), F.linear(teacher, weight, bias)
    losses, overlaps, error = soft_terms(logits, wanted, objective, torch.float64)
    torch.testing.assert_close(losses.mean(), loss.detach())
    torch.testing.assert_close(overlaps, overlap)
    torch.testing.assert_close(error @ weight / 37, grad)


def test_what_cannot_be_compiled_runs_as_it_is_after_one_warning(monkeypatch):
    def refuse(*given):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: refuse)
    run = loss.compiled(lambda x: x / (x - 2))
    with pytest.warns(UserWarning, match="slower without PyTorch's compiler: RuntimeError"):
        assert run(4) == 2
    assert run(3) == 3
    with pytest.raises(ZeroDivisionError):
        run(2)


@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["distribution", "overlap"])
def test_on_a_gpu_the_compiled_expression_gives_the_chunks_losses(objective):
    torch.manual_seed(0)
    hidden, teacher, weight = torch.randn(600, 64), torch.randn(600, 64), torch.randn(3000, 64) / 4
    found = []
    for device in ("cpu", "cuda"):
        own = hidden.to(device).requires_grad_()
        loss, _, overlap = chunked_loss(
            own, weight.to(device), torch.zeros(600, dtype=torch.long, device=device), None, 256, None,
            teacher.to(device), objective,
        )  # fmt: skip
        loss.backward()
        found.append((loss.detach().cpu(), overlap.cpu(), own.grad.cpu()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("apart", [1, 9, 15, 200])
def test_overlap_loss_teaches_where_distributions_have_hardly_anything_in_common(apart):
    """As autograd in float64, down to an overlap of 1e-13; where it underflows in float32, with finite numbers."""
    given = torch.tensor([[apart, -apart]], dtype=torch.float64, requires_grad=True)
    common = torch.minimum(given.softmax(-1), (-given.detach()).softmax(-1)).sum()
    (wanted,) = torch.autograd.grad(-common.log(), given)
    hidden = given.detach().float().requires_grad_()
    loss, _, _ = chunked_loss(hidden, torch.eye(2), torch.tensor([0]), teacher=-hidden.detach(), objective="overlap")
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()
    if apart < 40:
        assert torch.allclose(hidden.grad.double(), wanted, rtol=1e-3)


def test_a_loss_of_distributions_needs_a_teacher():
    for objective, words in (("overlap", "needs the teacher's states"), ("overlop", "unknown objective 'overlop'")):
        with pytest.raises(ValueError, match=words):
            chunked_loss(torch.zeros(1, 2), torch.eye(2), torch.tensor([0]), objective=objective)


def test_loss_in_bf16_stays_near_the_float64_loss(case):
    hidden, weight, _, targets = case
    exact = F.cross_entropy(hidden @ weight.T, targets)
    loss, _, _ = chunked_loss(hidden.float(), weight.bfloat16(), targets, chunk_tokens=8)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 0.02 * exact.item()


def test_ranks_count_the_likelier_tokens(case):
    hidden, weight, _, targets = case
    order = (hidden @ weight.T).argsort(-1, descending=True)
    expected = (order == targets[:, None]).int().argmax(-1)
    _, ranks, _ = chunked_loss(hidden, weight, targets, chunk_tokens=8, ranked=torch.stack((targets, order[:, 3])))
    assert torch.equal(ranks[0], expected) and (ranks[1] == 3).all()


def test_top_k_accuracy_equals_torchmetrics(case):
    hidden, weight, _, targets = case
    logits = hidden @ weight.T
    _, (ranks,), _ = chunked_loss(hidden, weight, targets, ranked=targets[None])
    metric = TopKAccuracy(3)
    metric.update(ranks[:10])
    metric.update(ranks[10:])
    for k, share in enumerate(metric.compute(), start=1):
        reference = MulticlassAccuracy(50, top_k=k, average="micro")(logits, targets)
        assert share.item() == pytest.approx(reference.item())
        assert top_k_accuracy(ranks, k).item() == pytest.approx(reference.item())


def test_tokens_per_step_count_the_heads_in_a_row_that_are_right():
    torch.manual_seed(0)
    # Three heads on two chunks of ten tokens: head i has no target for the last 1 + i positions.
    batches = [[torch.randint(0, 5, (2, 9 - i)) for i in (1, 2, 3)] for _ in range(2)]
    overlaps = [[torch.rand(ranks.shape) for ranks in batch] for batch in batches]
    metric = TokensPerStep(3)
    for ranks, shares in zip(batches, overlaps, strict=True):
        metric.update(ranks, shares)
    *greedy, sampled = metric.compute().tolist()
    rows = [[shares[row, :6] for shares in batch] for batch in overlaps for row in range(2)]
    chains = [1 + a + a * b + a * b * c for row in rows for a, b, c in zip(*row, strict=True)]
    assert len(chains) == 24 and sampled == pytest.approx(sum(map(float, chains)) / 24)
    for k, found in enumerate(greedy, start=1):
        steps = []
        for ranks in batches:
            for row in range(2):
                for t in range(6):
                    tokens = 1
                    for head in ranks:
                        if head[row, t] >= k:
                            break
                        tokens += 1
                    steps.append(tokens)
        assert found == pytest.approx(sum(steps) / len(steps))


# Not ru_maxrss, which a process takes over from the one that started it. The package would import what trains, too.
PEAK = """
import re, runpy, sys, torch
chunked_loss = runpy.run_path(sys.argv.pop(1))["chunked_loss"]
def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024
tokens, vocabulary, hidden_size, chunk_tokens = map(int, sys.argv[1:])
weight = torch.empty(vocabulary, hidden_size, dtype=torch.bfloat16).normal_()
targets = torch.randint(vocabulary, (tokens,))
# What the first product loads of libraries is none of the loss's, and differs with what the system has in its cache.
little = torch.randn(8, hidden_size, requires_grad=True)
chunked_loss(little, weight, targets[:8], chunk_tokens=8)[0].backward()
before = memory("VmRSS")
heads = [torch.randn(tokens, hidden_size, requires_grad=True) for _ in range(3)]
sum(chunked_loss(hidden, weight, targets, chunk_tokens=chunk_tokens)[0] for hidden in heads).backward()
assert all(hidden.grad is not None for hidden in heads)
print(memory("VmHWM") - before)
"""


def peak_bytes(*sizes: int) -> int:
    command = [sys.executable, "-c", PEAK, loss.__file__, *map(str, sizes)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_three_heads_of_a_long_text_need_less_than_2_gib_on_top_of_the_weights():
    """8,192 tokens, Llama-3.1-8B's vocabulary and hidden size: the inputs, all logits in flight and the gradients."""
    peak = peak_bytes(8192, 128256, 4096, 512)
    print(f"peak {peak / 2**30:.2f} GiB")
    # One float32 matrix of all logits would be 3.9 GiB.
    assert 0.5 * 2**30 < peak < 2 * 2**30


def test_memory_does_not_grow_with_the_whole_matrix_of_logits():
    """The same at a size for every day: all logits in float32 would be 64 MiB, those of a chunk are 4.

    What libraries take on their first use differs from run to run: up to 42 MiB were seen in all.
    """
    assert peak_bytes(512, 32768, 8, 32) < 48 * 2**20


@pytest.mark.parametrize("chunk_tokens", [1, 8, 512])
def test_loss_over_a_draft_vocabulary_equals_torchs_on_its_rows(case, chunk_tokens):
    """Tokens that are not drafted count in no mean; distributions are renormalised; the overlap is with the whole p."""
    hidden, weight, bias, targets = case
    chosen = torch.randperm(50)[:20].sort().values
    place = torch.full((50,), -1)
    place[chosen] = torch.arange(20)
    rows = weight[chosen], bias[chosen]
    logits = F.linear(hidden, *rows)
    naive = F.cross_entropy(logits, place[targets], ignore_index=-1)
    (naive_grad,) = torch.autograd.grad(naive, hidden, retain_graph=True)
    hard, (ranks,), _ = chunked_loss(hidden, rows[0], place[targets], rows[1], chunk_tokens, place[targets][None])
    (grad,) = torch.autograd.grad(hard, hidden)
    assert torch.allclose(hard, naive, rtol=0, atol=1e-9) and torch.allclose(grad, naive_grad, rtol=0, atol=1e-9)
    assert ((ranks == 20) == ~torch.isin(targets, chosen)).all()

    teacher = torch.randn(37, 16, dtype=torch.float64)
    p = F.linear(teacher, weight, bias).softmax(-1)
    renormalised = p[:, chosen] / p[:, chosen].sum(-1, keepdim=True)
    naive = F.cross_entropy(logits, renormalised)
    (naive_grad,) = torch.autograd.grad(naive, hidden, retain_graph=True)
    sums, likeliest, covered = over_vocabulary(teacher, weight, bias, chosen, chunk_tokens)
    assert torch.equal(likeliest, p.argmax(-1)) and torch.allclose(covered, p[:, chosen].sum(-1), rtol=0, atol=1e-9)
    soft, _, overlap = chunked_loss(
        hidden, rows[0], place[targets], rows[1], chunk_tokens, teacher=teacher, objective="distribution", log_sums=sums
    )
    (grad,) = torch.autograd.grad(soft, hidden)
    assert torch.allclose(soft, naive, rtol=0, atol=1e-9) and torch.allclose(grad, naive_grad, rtol=0, atol=1e-9)
    common = torch.minimum(logits.softmax(-1), renormalised).sum(-1)
    (naive_grad,) = torch.autograd.grad(-common.log().mean(), hidden, retain_graph=True)
    shared, _, whole = chunked_loss(
        hidden, rows[0], place[targets], rows[1], chunk_tokens, teacher=teacher, objective="overlap", log_sums=sums
    )
    (grad,) = torch.autograd.grad(shared, hidden)
    assert torch.allclose(shared, -common.log().mean(), rtol=0, atol=1e-9)
    assert torch.allclose(grad, naive_grad, rtol=0, atol=1e-9) and torch.allclose(whole, overlap, rtol=0, atol=1e-9)
    q = torch.zeros_like(p)
    q[:, chosen] = logits.softmax(-1)
    assert torch.allclose(overlap, 1 - (p - q).abs().sum(-1) / 2, rtol=0, atol=1e-9)


def test_the_most_expected_tokens_are_drafted():
    counts = torch.tensor([1.0, 5.0, 2.0, 5.0, 2.0])
    assert most_expected(counts, 3).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="1 to the model's 5 tokens, got 6"):
        most_expected(counts, 6)
    chunks = np.arange(12, dtype=np.uint32).reshape(3, 4) % 5
    one_hot = expected_counts(
        chunks, lambda ids: F.one_hot(ids, 5).double(), lambda states: 1e3 * states, torch.device("cpu")
    )
    assert one_hot.tolist() == np.bincount(chunks.flatten(), minlength=5).tolist()
