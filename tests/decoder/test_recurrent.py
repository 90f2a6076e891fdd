"""Recurrent layers and compressed keys: every text is plain decoding's, however it is read, drafted or resumed."""

import json

import pytest
import torch
from transformers import AutoConfig

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.backends.base import Chain, PassBatch, Tree
from decoder.backends.native.backend import NATIVE as NATIVE_BACKEND
from decoder.backends.reference.mixers import mixers_of
from decoder.cache.full import FullCache
from decoder.cache.partial import ranked
from decoder.model.architectures import refuse_unsupported
from decoder.model.loading import read_config
from decoder.sampling.token_tree import TokenTree

from .conftest import assert_preempted_as_alone, random_heads, random_tokens, some, transformers_text
from .recurrent_models import ALL, LATENTS, NATIVE, OFTEN, RECURRENT, made

NARROW = TokenSwiftOptions(tree=(1, 2, 1), ngrams=3, budget=24, sink=4)
METHODS = ["tokenswift", "medusa", "magicdec", "prompt-lookup", "auto", "draft-model", "triforce"]
OF_ALL = ["qwen3_5_text", "bamba", "deepseek_v3"]
"""The families that every method runs in each test; the others are run by some."""


@pytest.fixture(scope="module")
def decoders():
    """By family a decoder, made once."""
    found = {}

    def of(name):
        if name not in found:
            model = made(name)
            found[name] = Decoder(model, heads=random_heads(model), draft_model=made("lfm2"), prefix_cache_bytes=0)
        return found[name]

    return of


@pytest.mark.parametrize("name", ALL)
def test_greedy_is_transformers_own(name, decoders):
    dec, prompt = decoders(name), random_tokens(30, 1)
    expected = transformers_text(dec.model, prompt, 20)
    assert len(set(expected)) > 5
    # Each family runs a method of its own.
    for method in ("ar", METHODS[list(ALL).index(name) % len(METHODS)]):
        assert dec.generate(prompt, 20, method, SamplingParams(temperature=0), NARROW).token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_long_greedy_texts_of_all_methods_are_transformers_own(name, decoders):
    dec, prompt = decoders(name), random_tokens(30, 2)
    expected = transformers_text(dec.model, prompt, 150)
    for method in ("ar", *METHODS):
        assert (method, dec.generate(prompt, 150, method, SamplingParams(temperature=0), NARROW).token_ids) == (
            method,
            expected,
        )


@pytest.mark.parametrize("name", some([*ALL, *NATIVE], [*OF_ALL, *OFTEN]))
def test_every_method_equals_ar_when_sampling(name, decoders):
    dec, prompt = decoders(name), random_tokens(40, 3)
    sampling = SamplingParams(seed=3, min_p=0.02, repetition_penalty=1.2, penalty_window=16)
    expected = dec.generate(prompt, 16, "ar", sampling)
    # The library's layers know trees, chains, and what is read again.
    for method in METHODS if name in ALL else ("tokenswift", "magicdec", "draft-model"):
        out = dec.generate(prompt, 16, method, sampling, NARROW)
        assert (method, out.token_ids) == (method, expected.token_ids)
    # In bf16 rounding can make a router choose another expert.
    assert dec.target.dtype == torch.bfloat16 or dec.audit(expected).equal


def test_compressed_keys_are_ranked_by_what_is_kept_of_them(decoders):
    """The products of queries with them are those with the keys that they are expanded to."""
    target, ids = decoders("deepseek_v3").target, random_tokens(9, 9)
    seen, layer = {}, target.model.model.layers[1].self_attn

    class Expanding(type(layer)):
        def expand_kv(self, *kept):
            seen["key"], value = super().expand_kv(*kept)
            return seen["key"], value

    attend = layer.q_b_proj.register_forward_hook(lambda _, args, output: seen.update(query=output))
    own, layer.__class__ = type(layer), Expanding
    try:
        with torch.inference_mode():
            cache = FullCache(9)
            queries = target.reference.run(PassBatch([Chain(ids, 0, cache)], False, 9)).queries[1]
    finally:
        layer.__class__ = own
        attend.remove()
    cache.keep(range(9))
    key, value = cache.layer(1)
    products = queries @ ranked(key, value, queries).mT
    nope = layer.qk_nope_head_dim
    query = seen["query"].view(1, 9, -1, layer.qk_head_dim).transpose(1, 2)
    # The rotary parts of queries are turned behind the projection.
    rotary = queries[..., layer.kv_lora_rank :] @ value.mT
    torch.testing.assert_close(products - rotary, query[..., :nope] @ seen["key"][..., :nope].mT)


def test_snapkv_ranks_compressed_keys(decoders):
    dec, prompt, sampling = decoders("deepseek_v3"), random_tokens(50, 9), SamplingParams(seed=4)
    options = TokenSwiftOptions(tree=(1, 1), budget=24, sink=4, draft_cache="snapkv")
    expected = dec.generate(prompt, 16, "ar", sampling).token_ids
    assert dec.generate(prompt, 16, "magicdec", sampling, options).token_ids == expected


@pytest.mark.parametrize("name", some([*ALL, *NATIVE], [*OF_ALL, *OFTEN]))
def test_drafts_from_the_whole_text_are_right_every_time(name, decoders):
    """The draft pass goes on from the text's own states, and from those of what it has drafted."""
    options = TokenSwiftOptions(tree=(1, 1, 1, 1), budget=100)
    out = decoders(name).generate(random_tokens(12, 4), 20, "magicdec", SamplingParams(seed=5), options)
    assert out.stats.steps == 20 // 5


@pytest.mark.parametrize(
    "name", some([*RECURRENT, *NATIVE], ["qwen3_next", "qwen3_5_text, 16", "granitemoehybrid, 32"])
)
def test_a_draft_model_with_states_takes_back_what_the_text_did_not_go_on_with(name, decoders, monkeypatch):
    """Its own drafts are right every time, so it stands where the text does in each step, and reads nothing again."""
    gone_back, rewind = [], FullCache.rewind
    monkeypatch.setattr(
        FullCache, "rewind", lambda cache, length: gone_back.append(rewind(cache, length)) or cache.length
    )
    model = decoders(name).model
    dec, prompt, sampling = Decoder(model, draft_model=model), random_tokens(20, 5), SamplingParams(seed=7)
    out = dec.generate(prompt, 24, "draft-model", sampling, TokenSwiftOptions(tree=(1, 1, 1)))
    assert out.token_ids == dec.generate(prompt, 24, "ar", sampling).token_ids
    assert out.stats.steps == 6
    assert len(gone_back) == 6 and min(gone_back) >= len(prompt) - 1
    other = Decoder(made("bamba"), draft_model=model)
    expected = other.generate(prompt, 24, "ar", sampling).token_ids
    assert other.generate(prompt, 24, "draft-model", sampling, TokenSwiftOptions(tree=(1, 2, 1))).token_ids == expected
    assert min(gone_back) >= len(prompt) - 1


@pytest.mark.parametrize("name", some([*ALL, *NATIVE], ["lfm2", "deepseek_v3", *OFTEN]))
def test_batches_are_single_runs(name, decoders):
    dec, prompts = decoders(name), [random_tokens(count, count) for count in (5, 33, 18)]
    params = [SamplingParams(seed=seed, min_p=0.02) for seed in range(3)]
    expected = [
        dec.generate(*text, "ar", own).token_ids for *text, own in zip(prompts, (16, 9, 20), params, strict=True)
    ]
    for method in ("tokenswift", "medusa"):
        outs = dec.generate_batch(prompts, 20, method, params, NARROW)
        assert [out.token_ids[: len(text)] for out, text in zip(outs, expected, strict=True)] == expected


@pytest.mark.parametrize(
    "name",
    some(
        [*ALL, *NATIVE],
        ["qwen3_next", "minimax", "kimi_linear", "qwen3_next, 16", "lfm2_moe, 32", "granitemoehybrid, 32"],
    ),
)
def test_reused_prefixes_and_resumed_texts_are_fresh_ones(name, decoders):
    fresh, prompt = decoders(name), random_tokens(60, 6)
    reusing, sampling = (
        Decoder(fresh.model, heads=fresh.heads, prefix_cache_bytes=2**24),
        SamplingParams(seed=1, min_p=0.02),
    )
    whole = fresh.generate(prompt, 30, "ar", sampling).token_ids
    first = reusing.generate(prompt, 20, "ar", sampling).token_ids
    assert first == whole[:20]
    out = reusing.generate(prompt + first, 10, "ar", sampling)
    assert out.token_ids == fresh.generate(prompt + first, 10, "ar", sampling).token_ids
    if fresh.target.has_two_forms:
        # What the text has added to its prompt is another text's prompt, and computed otherwise there.
        assert 48 - 16 <= out.stats.reused_tokens <= 60
    else:
        # The whole text but the pair that is compared, and behind it what has not been committed.
        assert (out.token_ids, out.stats.reused_tokens) == (whole[20:], 78)
    out = reusing.generate(prompt, 30, "medusa", sampling, NARROW)
    assert out.token_ids == whole and out.stats.reused_tokens >= 48 - 16
    other = prompt[:50] + random_tokens(20, 7)
    out = reusing.generate(other, 10, "ar", sampling)
    assert out.token_ids == fresh.generate(other, 10, "ar", sampling).token_ids


@pytest.mark.parametrize("name", some([*ALL, *NATIVE], ["nemotron_h", "qwen3_5_text, 32", "granitemoehybrid, 32"]))
def test_preempted_texts_go_on_as_if_they_had_not_been(name, monkeypatch):
    positions = 96
    model = made(name, max_position_embeddings=positions)
    dec = Decoder(model, heads=random_heads(model))
    room = dec.target.kv_bytes * (2 * (positions + 64) + 10) + 2 * dec.target.beside_bytes(positions)
    if name not in LATENTS:  # the third begins beside the others and is in the way later
        room += dec.target.beside_bytes(positions)
    assert_preempted_as_alone(dec, room, NARROW, monkeypatch)


@pytest.mark.parametrize("name", some(RECURRENT, ["qwen3_5_text", "zamba2", "minimax"]))
def test_a_nodes_state_has_the_bits_of_plain_decoding(name, decoders):
    """Of each recurrent layer, given the same inputs: along every branch of a tree, and along a chain cut anywhere."""
    target = decoders(name).target
    prompt, tree = random_tokens(9, 8), TokenTree(3)
    for parent, token in ((0, 5), (0, 7), (1, 5), (3, 9), (2, 11)):
        tree.add(parent, token, "test")
    mixer = target.mixers[-1]
    inputs, outputs = [], []
    hooks = [
        mixer.register_forward_hook(lambda _, args, output: outputs.append(first(output))),
        mixer.register_forward_pre_hook(lambda _, args, named: inputs.append(given(args, named)), with_kwargs=True),
    ]
    with torch.inference_mode():
        cache = FullCache(40)
        target.reference.run(PassBatch([Chain(prompt, 0, cache)], False))
        cache.keep(range(len(prompt)))
        committed = cache.recurrent.committed
        target.reference.run(PassBatch([Tree(tree, cache)], True))
        rows = outputs[-1]
        for path in ([0, 1, 3, 4], [0, 2, 5]):
            alone = FullCache(40)
            for position, token in enumerate([*prompt, *(tree.tokens[node] for node in path)]):
                target.reference.run(PassBatch([Chain([token], position, alone)], True))
                alone.keep([0])
                if position >= len(prompt):
                    node = path[position - len(prompt)]
                    torch.testing.assert_close(outputs[-1][0, 0], rows[0, node], rtol=0, atol=1e-6)
        cache.keep([0, 2, 5])
    for hook in hooks:
        hook.remove()
    assert cache.recurrent.length == alone.recurrent.length == len(prompt) + 3
    for index in committed:
        for kind in ("conv_states", "recurrent_states"):
            mine, theirs = (getattr(one.recurrent.committed[index], kind)[0] for one in (cache, alone))
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def read(target, ids, step):
    """Logits of a text that is read so many tokens at a time."""
    cache, found = FullCache(len(ids)), []
    for start in range(0, len(ids), step):
        own = ids[start : start + step]
        found.append(target.reference.run(PassBatch([Chain(own, start, cache)], True)).logits)
        cache.keep(range(len(own)))
    return torch.cat(found)


def test_products_of_a_recurrent_layer_are_computed_for_all_tokens_at_once(decoders, monkeypatch):
    target, multiplied, own = decoders("qwen3_5_text").target, [], torch.nn.Linear.forward
    mixer = target.mixers[0]
    monkeypatch.setattr(
        torch.nn.Linear, "forward", lambda layer, x: multiplied.append((layer, x.shape[1])) or own(layer, x)
    )
    with torch.inference_mode():
        read(target, random_tokens(30, 1), 30)
    assert [count for layer, count in multiplied if layer is mixer.in_proj_qkv] == [30]
    assert [count for layer, count in multiplied if layer is mixer.out_proj] == [1, 29]


def test_a_recurrent_layer_may_change_what_its_last_product_gives_for_some_tokens():
    model = made("qwen3_5_text")
    layer, target = model.model.layers[0].linear_attn, Decoder(model).target
    own, ids = layer.forward, random_tokens(20, 2)
    with torch.inference_mode():
        plain = read(target, ids, 20)

    def changed(hidden_states, **named):
        output = own(hidden_states=hidden_states, **named)
        return -output if hidden_states[0, 0, 0] > 0 else output

    layer.forward = changed
    target.refresh_weights()
    with torch.inference_mode():
        alone, together = read(target, ids, 1), read(target, ids, 20)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    assert not torch.allclose(together, plain, atol=1e-3)


def first(output):
    return output[0] if isinstance(output, tuple) else output


def given(args, named):
    return args[0] if args else named["hidden_states"]


REFUSED = {
    "mamba": "recurrent state alone",
    "mamba2": "recurrent state alone",
    "falcon_mamba": "recurrent state alone",
    "rwkv": "do not leave in transformers' cache",
    "recurrent_gemma": "do not leave in transformers' cache",
    "deepseek_v32": "attention layers, which are not known",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_done_is_told_from_the_configuration(model_type):
    with pytest.raises(ValueError, match=f"^{model_type} .*{REFUSED[model_type]}"):
        refuse_unsupported(AutoConfig.for_model(model_type))


WRITTEN = {
    "granitemoehybrid": dict(layer_types=["mamba", "attention", "mamba"]),
    "nemotron_h": dict(layers_block_type=["mamba", "mlp", "attention", "moe"]),
    "zamba2": dict(layers_block_type=["mamba", "hybrid", "mamba"]),
}


@pytest.mark.parametrize("model_type", WRITTEN)
def test_kinds_of_layers_may_have_the_names_of_published_folders(model_type, tmp_path):
    [kinds] = WRITTEN[model_type].values()
    written = dict(model_type=model_type, num_hidden_layers=len(kinds), **WRITTEN[model_type])
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path).num_hidden_layers == len(kinds)


CHANGES = {
    "a hook": lambda model: model.model.layers[0].linear_attn.register_forward_hook(lambda *given: None),
    "a window": lambda model: setattr(model.config, "sliding_window", 3),
    "a scale": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 1.5),
    "all scales": lambda model: [setattr(model.model.layers[n].self_attn, "scaling", 1.5) for n in (1, 3)],
    "an activation": lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.ReLU()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_the_library_does_not_run_any_more_goes_on_by_its_modules(with_native, change):
    model, prompt = made("qwen3_5_text, 32"), random_tokens(20, 1)
    dec = Decoder(model)
    greedy = SamplingParams(temperature=0)
    dec.generate(prompt, 4, "ar", greedy)
    assert dec.target.backend.name == NATIVE_BACKEND and dec.target.backend.whole is not None
    change(model)
    assert dec.generate(prompt, 12, "suffix", greedy).token_ids == transformers_text(model, prompt, 12)
    assert dec.target.backend.whole is None and "transformers' modules with its products" in dec.report()


def test_recurrent_layers_are_not_run_under_autocast(decoders):
    with torch.autocast("cpu"), pytest.raises(ValueError, match="not run under autocast"):
        decoders("lfm2").generate([1, 2, 3], 2, "ar")


def test_recurrent_layers_are_found_by_what_they_leave_in_the_cache():
    assert {name: len(mixers_of(list(made(name).modules()))) for name in ("falcon_h1", "zamba2", "nemotron_h")} == {
        "falcon_h1": 2,
        "zamba2": 5,
        "nemotron_h": 2,
    }
