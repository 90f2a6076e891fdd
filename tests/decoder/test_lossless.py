"""The product: whatever drafts, the same seed gives the same tokens as AR, and AR is transformers' own decoding."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LogitsProcessorList,
    MinPLogitsWarper,
    OPTConfig,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.drafters import TUNED

from .conftest import VOCAB, all_heads, random_heads, tiny_llama
from .scipy_free import chi_square_tail

SAMPLERS = {
    "plain": SamplingParams(seed=1),
    "paper": SamplingParams(seed=2, min_p=0.1, repetition_penalty=1.2, penalty_window=1024),
    "short window": SamplingParams(seed=3, top_p=0.9, repetition_penalty=1.5, penalty_window=7),
    "all filters": SamplingParams(
        seed=4, temperature=0.8, top_k=20, top_p=0.95, min_p=0.02, eta_cutoff=1e-3, repetition_penalty=1.1
    ),
    "greedy": SamplingParams(temperature=0),
    "greedy, penalised": SamplingParams(temperature=0, repetition_penalty=1.3, penalty_window=32),
}
PAPER = dict(tree=(1, 3, 3, 3), ngrams=20)
OPTIONS = {
    "paper": TokenSwiftOptions(**PAPER),
    "by cost": TokenSwiftOptions(budget=30),
    "by cost, few n-grams": TokenSwiftOptions(cache="full", coupled=False, ngrams=3, ngram_delay=True),
    "narrow": TokenSwiftOptions(tree=(1, 2), ngrams=2, budget=20),
    "chain": TokenSwiftOptions(tree=(1, 1, 1, 1), ngrams=0, budget=17),
    "wide": TokenSwiftOptions(tree=(3, 3, 3, 3), ngrams=5, budget=33, sink=4),
    "static": TokenSwiftOptions(cache="static", budget=24, **PAPER),
    "full": TokenSwiftOptions(cache="full", coupled=False, **PAPER),
    "paths": TokenSwiftOptions(tree=((0, 0, 0), (0, 1), (1,), (2, 0, 0, 0)), ngrams=3, ngram_delay=True, budget=30),
    "deeper than the heads": TokenSwiftOptions(tree=(1, 2, 1, 1, 3, 3), ngrams=50, budget=4000, sink=0),
}


LENGTH = 80
DRAFTING = [method for method in methods() if method != "ar"]
CASES = [("tokenswift", name) for name in OPTIONS]
CASES += [(method, name) for method in DRAFTING if method != "tokenswift" for name in ("paper", "narrow", "paths")]
CASES += [(method, "by cost") for method in TUNED if method != "tokenswift"]


# Every case under one sampler; each method under another; a few under the others.
# The rest is slow.
FOR_ALL, FOR_MOST = "short window", "greedy, penalised"
FEW = (("tokenswift", "paper"), ("auto", "paths"))
MOST = [(method, options) for method, options in CASES if options in ("paper", "by cost")]
UNDER_ALL = [
    pytest.param(
        *(name, *case),
        marks=[] if name == FOR_ALL or case in FEW or (name == FOR_MOST and case in MOST) else pytest.mark.slow,
        id="-".join((name, *case)),
    )
    for name in SAMPLERS
    for case in CASES
]


@pytest.fixture(scope="module")
def plain(dec, prompt):
    """Plain decoding under each of the samplers."""
    return {name: dec.generate(prompt, LENGTH, "ar", sampling) for name, sampling in SAMPLERS.items()}


def test_what_is_run_by_default_is_there():
    assert {FOR_ALL, FOR_MOST} <= set(SAMPLERS) and set(FEW) <= set(CASES)
    assert {method for method, _ in MOST} == set(DRAFTING)


@pytest.mark.parametrize("name, method, options", UNDER_ALL)
def test_every_method_equals_ar(dec, prompt, plain, name, method, options):
    sampling, expected = SAMPLERS[name], plain[name]
    drafted = dec.generate(prompt, LENGTH, method, sampling, OPTIONS[options])
    assert drafted.token_ids == expected.token_ids
    # Trees that follow the clock may not pay on a busy machine.
    if method not in ("auto", "suffix") and OPTIONS[options].tree is not None:
        assert drafted.stats.accepted > 0
        assert drafted.stats.steps < expected.stats.steps


@pytest.mark.parametrize("kind", ["chained", "gated"])
@pytest.mark.parametrize("autocast", [False, True])
def test_single_precision_differs_in_ties_only(prompt, kind, autocast):
    """Packed weights and heads in bfloat16 take part here, and not in float64; under autocast neither does."""
    model = tiny_llama(torch.float32)
    dec = Decoder(model, heads=all_heads(model, kind), draft_model=tiny_llama(torch.float32, seed=2))
    sampling = SamplingParams(seed=5, min_p=0.05, repetition_penalty=1.2)
    for method in methods() if kind == "chained" else ("auto", "medusa", "tokenswift", "tokenswift-fused"):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = dec.generate(prompt, 40, method, sampling)
        assert len(out.token_ids) == 40
        if not autocast:
            assert (dec.audit(out).margin or 0) < 1e-4


@pytest.fixture(scope="module")
def decoders(dec):
    """GQA, MHA, and MQA with tied embeddings and untrained heads of another gamma and kind."""
    found = [dec]
    for groups, tied, num_heads, kind in ((4, False, 2, "conditioned"), (1, True, 4, "independent")):
        model = tiny_llama(seed=groups, num_key_value_heads=groups, tie_word_embeddings=tied)
        found.append(Decoder(model, heads=all_heads(model, kind, num_heads), draft_model=dec.draft_model))
    return found


RANDOMLY = dict(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(max_examples=20, **RANDOMLY)
@given(data=st.data())
def test_every_method_equals_ar_whatever_the_settings(decoders, data, monkeypatch):
    assert_equal_to_ar(decoders, data.draw, monkeypatch)


@pytest.mark.slow
@settings(max_examples=400, **RANDOMLY)
@given(data=st.data())
def test_every_method_equals_ar_whatever_the_settings_many_times(decoders, data, monkeypatch):
    assert_equal_to_ar(decoders, data.draw, monkeypatch)


def assert_equal_to_ar(decoders, draw, monkeypatch):
    """A drawn method, with drawn options and sampling, gives the text of plain decoding."""
    dec = draw(st.sampled_from(decoders))
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=90))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 5, 100])),
        top_p=draw(st.sampled_from([0.5, 0.95, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.8, 1.4])),
        penalty_window=draw(st.integers(0, 60)),
        seed=draw(st.integers(0, 2**40)),
        suppress_tokens=draw(st.sampled_from([(), (3, 17), tuple(range(VOCAB - 2))])),
    )
    sink = draw(st.integers(0, 8))
    branching = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    paths = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=9)
    options = TokenSwiftOptions(
        tree=draw(branching | paths),
        ngrams=draw(st.integers(0, 10)),
        ngram_delay=draw(st.booleans()),
        budget=draw(st.none() | st.integers(sink + 1, 150)),
        sink=sink,
        cache=draw(st.sampled_from(["dynamic", "static", "full"])),
        draft_cache=draw(st.sampled_from(["streaming", "snapkv"])),
        draft_budget=draw(st.none() | st.integers(sink + 1, 40)),
        coupled=draw(st.booleans()),
    )
    length = draw(st.integers(0, 60))
    expected = dec.generate(prompt, length, "ar", sampling)
    monkeypatch.setattr("decoder.model.target._PREFILL_CHUNK", draw(st.sampled_from([1, 7, 512])))
    monkeypatch.setattr("decoder.backends.reference.attention._MAX_SCORES", draw(st.sampled_from([1, 900, 2**26])))
    method = draw(st.sampled_from(DRAFTING))
    assert dec.generate(prompt, length, method, sampling, options).token_ids == expected.token_ids
    assert len(expected.token_ids) == length


@pytest.mark.parametrize(
    "kind, num_heads",
    [
        *product(["chained", "independent", "medusa", "conditioned", "gated"], [5]),
        *product(["chained", "gated"], [1, 2]),
    ],
)
def test_any_gamma_and_kind(model, prompt, num_heads, kind):
    dec = Decoder(model, heads=random_heads(model, num_heads, kind))
    sampling = SamplingParams(seed=5, repetition_penalty=1.2)
    expected = dec.generate(prompt, 40, "ar", sampling).token_ids
    options = TokenSwiftOptions(tree=(2, 2, 1, 1, 1, 1, 1))
    for method, levels in (("tokenswift", num_heads + 1), ("medusa", num_heads)):
        out = dec.generate(prompt, 40, method, sampling, options)
        assert out.token_ids == expected
        assert len(out.stats.accepted_by_depth) >= levels


def test_the_first_three_sampled_tokens_follow_transformers_distribution():
    """Chi-square of each position's marginal over 1,000 seeds; a false alarm once in 10^6 per position.

    The referee walks the whole tree of two tokens with transformers' processors: the marginal of the third token is
    the sum over all that may stand before it. A penalty that is left out is found with a probability of 0.96 at the
    first position alone. A temperature that is left out, 0.95 in its place, or filters that come before it let tokens
    appear that cannot: some 8 among the draws of the first position.

    The texts are decoded together; some of them alone, and by drafts, as well.
    """
    vocab, prompt, draws = 12, [3, 1, 4, 1, 5], 1000
    model = tiny_llama(vocab_size=vocab)
    # Logits as it gives them differ too little for penalty and filters to count.
    model.lm_head.weight.data.mul_(3)
    dec = Decoder(model, heads=random_heads(model))
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.9),
            TopKLogitsWarper(8),
            MinPLogitsWarper(0.02),
        ]
    )
    texts, chances, marginals = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64), []
    for _ in range(3):
        with torch.inference_mode():
            following = processors(texts, model(texts).logits[:, -1]).softmax(-1)
        joint = chances[:, None] * following
        marginals.append(joint.sum(0))
        texts = torch.cat((texts.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(texts))[:, None]), dim=1)
        texts, chances = texts[joint.flatten() > 0], joint.flatten()[joint.flatten() > 0]
    sampling = SamplingParams(temperature=0.9, top_k=8, min_p=0.02, repetition_penalty=1.3)
    seeded = [replace(sampling, seed=seed) for seed in range(draws)]
    drawn = [out.token_ids for out in dec.generate_batch([prompt] * draws, 3, "ar", seeded)]
    assert drawn[:20] == [dec.generate(prompt, 3, "ar", one).token_ids for one in seeded[:20]]
    assert drawn[:60] == [out.token_ids for out in dec.generate_batch([prompt] * 60, 3, "tokenswift", seeded[:60])]
    counts = torch.zeros(3, vocab)
    for position, tokens in enumerate(zip(*drawn, strict=True)):
        counts[position] += torch.tensor(tokens).bincount(minlength=vocab)
    for count, expected in zip(counts, marginals, strict=True):
        possible = expected > 0
        assert count[~possible].sum() == 0
        # Cells of less than 5 expected draws go together, as the test's distribution asks.
        rare = possible & (draws * expected < 5)
        cells = [(count[i], expected[i]) for i in (possible & ~rare).nonzero().flatten()]
        if rare.any():
            cells.append((count[rare].sum(), expected[rare].sum()))
        statistic = sum(float((seen - draws * p) ** 2 / (draws * p)) for seen, p in cells)
        assert len(cells) > 2
        assert chi_square_tail(statistic, len(cells) - 1) > 1e-6


POSITIONS = 40


@pytest.fixture(scope="module", params=[GPT2Config, OPTConfig], ids=["gpt2", "opt"])
def full_texts(request):
    """A decoder of a model with a table of positions, and as (prompt, sampling, continuation) texts that fill it."""
    shape = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48)
    ends = dict(eos_token_id=None, bos_token_id=None, max_position_embeddings=POSITIONS, word_embed_proj_dim=32)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(request.param(**shape, **ends)).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    dec = Decoder(model, heads=random_heads(model, num_heads=5), draft_model=model)
    found = []
    for prompt_tokens in (1, 31, POSITIONS - 2, POSITIONS - 1, POSITIONS):
        for sampling in (SamplingParams(temperature=0), SamplingParams(seed=prompt_tokens)):
            prompt = ([7, 11, 13, 17] * POSITIONS)[:prompt_tokens]
            found.append((prompt, sampling, dec.generate(prompt, None, "ar", sampling).token_ids))
            assert len(found[-1][2]) == POSITIONS - prompt_tokens
    return dec, found


@pytest.mark.parametrize("method", [method for method in DRAFTING if method != "eagle3"])  # its layer is Llama's
def test_nothing_looks_beyond_the_last_of_the_learned_positions(full_texts, method):
    """A text as long as the model's table of positions: one draft too deep would be an index out of range."""
    dec, texts = full_texts
    options = TokenSwiftOptions(tree=(1, 2, 1, 1, 1, 1), ngrams=4, budget=10**12, draft_budget=10**12)
    for prompt, sampling, expected in texts:
        assert dec.generate(prompt, None, method, sampling, options).token_ids == expected


def test_a_small_model_with_too_few_positions_is_told(dec, model, prompt):
    short = Decoder(model, draft_model=tiny_llama(seed=2, max_position_embeddings=50))
    with pytest.raises(ValueError, match="50 positions, fewer than the 60"):
        short.generate(prompt, 20, "triforce")


@pytest.mark.parametrize("method", methods())
def test_a_model_that_gives_nan_is_told_by_every_method(method, prompt):
    """Drafts of NaN are nobody's fault but the model's, and the verification says so."""
    for kind in ("chained", "gated"):
        model = tiny_llama()
        dec = Decoder(model, heads=all_heads(model, kind), draft_model=tiny_llama(seed=2))
        with torch.no_grad():
            model.lm_head.weight[5] = torch.nan
        for temperature in (0.0, 1.0):
            with pytest.raises(ValueError, match="logits hold NaN"):
                dec.generate(prompt, 9, method, SamplingParams(temperature=temperature, min_p=0.1))


@pytest.mark.parametrize("method", ["auto", "suffix"])
def test_trees_that_follow_the_clock_are_not_verified_independently(dec, prompt, method):
    with pytest.raises(ValueError, match="follow the clock"):
        dec.generate(prompt, 9, method, options=TokenSwiftOptions(verification="independent"))


def test_a_drafter_that_lies_changes_nothing(dec, prompt, monkeypatch):
    """Any proposal is safe: here trees of random tokens, right only by chance."""
    from decoder.drafters import METHODS, Autoregressive
    from decoder.sampling.token_tree import TokenTree

    generator = torch.Generator().manual_seed(0)

    class Liar(Autoregressive):
        def __init__(self, *args, **kwargs):
            self.max_nodes = 30

        def propose(self, cache, sampler, depth):
            tree = TokenTree(sampler.context[-1])
            while len(tree) < 30:
                parent = int(torch.randint(len(tree), (1,), generator=generator))
                tree.add(parent, int(torch.randint(VOCAB, (1,), generator=generator)), "chance")
            return tree

    monkeypatch.setitem(METHODS, "liar", Liar)
    sampling = SamplingParams(seed=9, repetition_penalty=1.2, penalty_window=16)
    lied = dec.generate(prompt, 100, "liar", sampling)
    assert lied.token_ids == dec.generate(prompt, 100, "ar", sampling).token_ids
    assert lied.stats.accepted > 0


def test_bfloat16_runs_and_is_of_the_right_length(prompt):
    model = tiny_llama(torch.bfloat16)
    out = Decoder(model, heads=random_heads(model)).generate(prompt, 64, sampling=SamplingParams(seed=1))
    assert len(out.token_ids) == 64


@pytest.mark.gpu
def test_cuda_equals_ar_on_cuda(prompt):
    model = tiny_llama().cuda()
    dec = Decoder(model, heads=all_heads(model), draft_model=tiny_llama(seed=2, num_hidden_layers=1).cuda())
    for sampling in SAMPLERS.values():
        expected = dec.generate(prompt, 100, "ar", sampling).token_ids
        for method in DRAFTING:
            assert dec.generate(prompt, 100, method, sampling, OPTIONS["narrow"]).token_ids == expected
