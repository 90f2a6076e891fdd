"""The exact rule gives the target's distribution; the paper's gives drafted tokens too much, as its formula says."""

import pytest
import torch

from decoder import SamplingParams, TokenSwiftOptions
from decoder.sampling.acceptance import Independent, exact
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree, rank_paths

from .conftest import take
from .scipy_free import chi_square_tail

CPU = torch.device("cpu")
TARGET = torch.tensor([0.05, 0.30, 0.10, 0.15, 0.02, 0.08, 0.20, 0.10], dtype=torch.float64)
DRAWS = 2000


def papers_tree(first):
    """27 paths through one first token."""
    tree = TokenTree(0)
    tree.add_ranked([[first], [1, 2, 3], [1, 2, 3], [4, 5, 6]], rank_paths((1, 3, 3, 3), 4), "heads")
    return tree


def first_tokens(rule, tree):
    """How often each token comes first; the target's distribution is `TARGET` at every node."""
    logits = TARGET.log().expand(len(tree), -1)
    counts = torch.zeros(len(TARGET), dtype=torch.float64)
    for seed in range(DRAWS):
        accept = exact if rule == "exact" else Independent(seed, CPU)
        sampler = Sampler(SamplingParams(seed=seed), len(TARGET), CPU, [0])
        path, tokens = take(accept, tree, logits, sampler)
        assert [tree.tokens[node] for node in path[1:]] == tokens[:-1]
        counts[tokens[0]] += 1
    return counts


@pytest.mark.parametrize("drafted", [0, 1])
def test_exact_verification_has_no_bias(drafted):
    """Chi-square over 2,000 seeds; a false alarm once in 10^6."""
    counts = first_tokens("exact", papers_tree(drafted))
    statistic = ((counts - DRAWS * TARGET) ** 2 / (DRAWS * TARGET)).sum().item()
    assert chi_square_tail(statistic, len(TARGET) - 1) > 1e-6


@pytest.mark.parametrize("drafted", [0, 1])
def test_independent_verification_favours_drafted_tokens(drafted):
    """p = 0.05 comes out with 1 - 0.95^27 = 0.75; both chi-squares are wrong by chance once in 10^6."""
    counts = first_tokens("independent", papers_tree(drafted))
    statistic = ((counts - DRAWS * TARGET) ** 2 / (DRAWS * TARGET)).sum().item()
    assert chi_square_tail(statistic, len(TARGET) - 1) < 1e-12
    chance = 1 - (1 - TARGET[drafted]) ** 27
    off = (counts[drafted] - DRAWS * chance) ** 2 / (DRAWS * chance * (1 - chance))
    assert chi_square_tail(off.item(), 1) > 1e-6


def test_a_single_path_verified_independently_has_no_bias():
    """A chain has one path, so one draw per node: the bias comes from the number of paths. False alarm 1 in 10^6."""
    tree = TokenTree(0)
    tree.add_path([1, 2, 3], "heads")
    counts = first_tokens("independent", tree)
    statistic = ((counts - DRAWS * TARGET) ** 2 / (DRAWS * TARGET)).sum().item()
    assert chi_square_tail(statistic, len(TARGET) - 1) > 1e-6


def test_independent_ties_are_broken_at_random():
    """Two paths of chance 1/2 each, which both match a quarter of the time, win equally often; false alarm 1 in 10^6.

    Were the first to win ties, it would win twice as often.
    """
    tree = TokenTree(0)
    tree.add_ranked([[1, 2]], rank_paths((2,), 1), "heads")
    logits = torch.tensor([-torch.inf, 0.0, 0.0]).double().expand(3, -1)
    wins = [0, 0, 0]
    for seed in range(DRAWS):
        path, _ = take(Independent(seed, CPU), tree, logits, Sampler(SamplingParams(), 3, CPU, [0]))
        wins[path[-1]] += 1
    assert chi_square_tail((wins[1] - wins[2]) ** 2 / (wins[1] + wins[2]), 1) > 1e-6


def test_independent_verification_ends_where_it_is_told():
    tree = papers_tree(1)
    logits = torch.full((len(tree), 8), -torch.inf).double()
    for node, token in enumerate(tree.tokens):
        logits[tree.parents[node] if node else 0, token if node else 1] = 0.0
    logits[tree.leaves(), 7] = 0.0
    sampler = Sampler(SamplingParams(seed=1), 8, CPU, [0], collect_logprobs=True)
    path, tokens = take(Independent(1, CPU), tree, logits, sampler, lambda token: len(sampler.context) == 3)
    assert len(path) == len(tokens) == 2
    assert sampler.context == [0, *tokens]
    assert len(sampler.logprobs) == 2


def test_a_hook_is_given_the_text_of_each_node_that_is_drawn_independently():
    """Each node's draw is the token that the hook asks for behind the node's own path, so a whole path is accepted."""
    after = {(0,): 1, (0, 1): 3, (0, 2): 4, (0, 1, 3): 5}
    tree = TokenTree(0)
    tree.add_path([1, 3], "heads")
    tree.add_path([2], "heads")

    def hook(context, logits):
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([after[tuple(context)]]), 0.0)

    sampler = Sampler(SamplingParams(), 8, CPU, [0], hook)
    assert take(Independent(1, CPU), tree, torch.zeros(len(tree), 8).double(), sampler) == ([0, 1, 2], [1, 3, 5])


def test_independent_generation_follows_its_seed(dec, prompt):
    options = TokenSwiftOptions(verification="independent")
    runs = [dec.generate(prompt, 60, sampling=SamplingParams(seed=s), options=options) for s in (1, 1, 2)]
    assert runs[0].token_ids == runs[1].token_ids != runs[2].token_ids
    assert len(runs[0].token_ids) == 60


def test_greedy_choices_are_the_same_independently_drawn(dec, prompt):
    greedy = SamplingParams(temperature=0)
    out = dec.generate(prompt, 60, sampling=greedy, options=TokenSwiftOptions(verification="independent"))
    assert out.token_ids == dec.generate(prompt, 60, "ar", greedy).token_ids
