"""What each drafter proposes: right where it can know the answer, in as few passes as it promises."""

import pytest
import torch

from decoder import Decoder, DraftHeads, SamplingParams, TokenSwiftOptions

from .conftest import VOCAB, clocked, random_heads, random_tokens, tiny_llama


def markov_llama():
    """A model whose next token depends on the newest one alone: no layers, t's state is e(t), t + 1 follows."""
    model = tiny_llama(hidden_size=VOCAB, num_hidden_layers=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.lm_head.weight.copy_(torch.eye(VOCAB).roll(1, 0))
    return model


def shifting_heads(num_heads, kind):
    """Heads that know `markov_llama`: independent head i turns e(t) into e(t + i), so it predicts t + i + 1.

    Conditioned ones know it from the token before alone: they put its embedding in the place of the state.
    """
    heads = DraftHeads(VOCAB, num_heads, kind=kind).double()
    identity = torch.eye(VOCAB, dtype=torch.float64)
    with torch.no_grad():
        for i, head in enumerate(heads.heads, start=1):
            # The residual brings e(t) along; its norm has made e(t) longer by sqrt(V).
            ahead = i if kind == "independent" else 1
            weight = identity.roll(ahead, 0) - identity
            if kind in ("conditioned", "gated"):
                weight = torch.cat((-identity, identity), dim=1)
            head.linear.weight.copy_(weight / VOCAB**0.5)
    return heads


GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize("method, levels", [("tokenswift", 4), ("medusa", 3)])
@pytest.mark.parametrize("kind", ["chained", "independent", "conditioned", "gated"])
def test_heads_that_know_the_text_are_accepted_whole(method, levels, kind):
    """Each level is the head of its own position: off by one, nothing would be accepted."""
    dec = Decoder(markov_llama(), heads=shifting_heads(3, kind))
    options = TokenSwiftOptions(tree=(1, 1, 1, 1), ngrams=0)
    out = dec.generate([5], 41, method, GREEDY, options)
    assert out.token_ids == [(6 + i) % VOCAB for i in range(41)]
    first_steps = 1 if method == "medusa" else 0
    assert out.stats.steps - first_steps == -(-(41 - first_steps) // (levels + 1))


@pytest.mark.parametrize("width_costs", [0.0, 100.0])
@pytest.mark.parametrize("method", ["auto", "suffix", "tokenswift", "tokenswift-fused"])
def test_cost_tuned_trees_draft_where_it_pays_and_only_there(dec, method, width_costs, monkeypatch):
    """With a clock and costs of the test's own: nodes for nothing are taken, nodes dearer than steps never."""
    clocked(monkeypatch, width_costs)
    tuned = Decoder(dec.model, heads=random_heads(dec.model))
    out = tuned.generate([1, 2, 3, 4] * 20, 100, method, SamplingParams(temperature=0))
    assert out.token_ids == tuned.generate([1, 2, 3, 4] * 20, 100, "ar", SamplingParams(temperature=0)).token_ids
    assert (out.stats.steps < 60) is (width_costs == 0)
    assert (out.stats.accepted == 0) is (width_costs > 0)


@pytest.mark.parametrize("node_seconds, nodes", [(0.0, 4), (0.3, 4), (100.0, 1)])
def test_medusa_without_a_tree_drafts_what_pays(node_seconds, nodes, monkeypatch):
    """Heads that know the text: once that is seen, all three levels or none, and nothing beside the right token."""
    clocked(monkeypatch, node_seconds)
    dec = Decoder(markov_llama(), heads=shifting_heads(3, "independent"))
    for _ in range(3):
        out = dec.generate([5], 120, "medusa", GREEDY)
        assert out.token_ids == [(6 + i) % VOCAB for i in range(120)]
    assert out.stats.generated / out.stats.steps > 0.8 * nodes
    if node_seconds:
        assert out.stats.nodes / out.stats.steps < nodes + 0.5


def test_draws_that_follow_the_tree_are_not_steered_by_the_clock(dec, prompt):
    """Where a text follows from its trees, as in the paper's own verification, these are the paper's."""
    given = TokenSwiftOptions(verification="independent", tree=(1, 3, 3, 3), ngrams=20)
    for method in ("tokenswift", "medusa", "tokenswift-fused"):
        outs = [dec.generate(prompt, 30, method, options=options) for options in
                (given, TokenSwiftOptions(verification="independent"))]  # fmt: skip
        assert outs[0].token_ids == outs[1].token_ids and outs[0].stats.nodes == outs[1].stats.nodes


def test_nodes_of_all_trees_are_counted(dec, prompt):
    sampling = SamplingParams(seed=8)
    plain = dec.generate(prompt, 20, "ar", sampling)
    assert plain.stats.nodes == plain.stats.steps == 20
    chain = dec.generate(prompt, 20, "magicdec", sampling, TokenSwiftOptions(tree=(1,), budget=100))
    assert chain.stats.nodes == 2 * chain.stats.steps == 20


@pytest.mark.parametrize("penalty_window", [5, 1024])
@pytest.mark.parametrize("tree, steps", [((1,), 20), ((1, 3, 3, 3), 8), ((2,) * 9, 4)])
def test_self_speculation_that_sees_the_whole_text_is_right_every_time(dec, prompt, tree, steps, penalty_window):
    """A chain as deep as the tree, drafted with the noise and the penalty window of its own positions."""
    sampling = SamplingParams(seed=8, repetition_penalty=1.3, penalty_window=penalty_window)
    options = TokenSwiftOptions(tree=tree, budget=100)
    out = dec.generate(prompt, 40, "magicdec", sampling, options)
    assert out.stats.steps == steps
    assert out.stats.accepted == 40 - steps


@pytest.mark.parametrize("tree, steps", [((1,), 20), ((1, 3, 3, 3), 8), ((2,) * 9, 4)])
@pytest.mark.parametrize("small", ["itself", "another"])
def test_triforce_whose_partial_cache_holds_the_text_is_right_every_time(model, dec, prompt, small, tree, steps):
    """The middle tier decides, however good the small model is; the model may even be its own small one."""
    draft_model = model if small == "itself" else dec.draft_model
    sampling = SamplingParams(seed=8, repetition_penalty=1.3, penalty_window=6)
    options = TokenSwiftOptions(tree=tree, budget=100)
    out = Decoder(model, draft_model=draft_model).generate(prompt, 40, "triforce", sampling, options)
    assert out.stats.steps == steps
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("small_is_right", [True, False])
def test_triforce_takes_the_small_models_guesses(model, dec, prompt, small_is_right, monkeypatch):
    """A perfect small model makes one pass over the partial cache a step; a poor one costs more of them."""
    passes = []
    decoder = Decoder(model, draft_model=tiny_llama() if small_is_right else dec.draft_model)
    draft = decoder.target.draft
    monkeypatch.setattr(decoder.target, "draft", lambda *arguments: passes.append(1) or draft(*arguments))
    out = decoder.generate(prompt, 60, "triforce", SamplingParams(seed=3), TokenSwiftOptions(budget=120))
    assert out.stats.steps == 12
    assert (len(passes) == 12) is small_is_right


def test_the_small_model_may_be_changed_between_generations(model, dec, prompt):
    small = tiny_llama(torch.float32)
    decoder = Decoder(model, draft_model=small)
    expected = decoder.generate(prompt, 30, "ar").token_ids
    for dtype in (torch.float32, torch.float64):
        small.to(dtype)
        assert decoder.generate(prompt, 30, "triforce").token_ids == expected


def test_the_small_model_reads_a_long_prompt_in_chunks(model, dec):
    prompt = random_tokens(600, 1)
    sampling, options = SamplingParams(seed=3), TokenSwiftOptions(budget=40)
    expected = dec.generate(prompt, 30, "ar", sampling).token_ids
    assert dec.generate(prompt, 30, "triforce", sampling, options).token_ids == expected
