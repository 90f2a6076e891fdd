"""Models whose layers see a window or a chunk of the text, with sinks, soft caps and shared keys: exact with all."""

import random

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.backends.native.backend import NATIVE
from decoder.cache import window
from decoder.cache.full import FullCache
from decoder.cache.layout import LayerKind
from decoder.cache.window import WindowState

from .conftest import VOCAB, random_heads, transformers_text
from .test_families import EXPERTS, tiny

SLIDING = dict(sliding_window=12, head_dim=8, num_hidden_layers=3)
TYPES = dict(SLIDING, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
SHARED = dict(
    tie_word_embeddings=False,
    head_dim=8,
    sliding_window=12,
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
)

# model type and what differs from the shape of `test_families`; windows and chunks bind in texts of some dozen tokens
FAMILIES = {
    "mistral": ("mistral", SLIDING),
    "gemma2": (
        "gemma2",
        dict(
            TYPES,
            tie_word_embeddings=False,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3_text": ("gemma3_text", dict(TYPES, tie_word_embeddings=False, query_pre_attn_scalar=8)),
    "gemma3n_text": ("gemma3n_text", dict(SHARED, laurel_rank=4, activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0])),
    "gemma4_text": ("gemma4_text", dict(SHARED, global_head_dim=16, num_global_key_value_heads=1)),
    "gemma4_text, experts": (
        "gemma4_text",
        dict(
            TYPES,
            tie_word_embeddings=False,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            global_head_dim=16,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=16,
            final_logit_softcapping=3.0,
        ),
    ),
    "olmo3": ("olmo3", TYPES),
    "cohere2": ("cohere2", dict(TYPES, logit_scale=0.25)),
    "exaone4": ("exaone4", TYPES),
    "gpt_oss": ("gpt_oss", dict(EXPERTS, **TYPES)),
    "llama4_text": (
        "llama4_text",
        dict(
            EXPERTS,
            head_dim=8,
            num_hidden_layers=4,
            attention_chunk_size=12,
            floor_scale=8,
            attn_scale=0.5,
            attn_temperature_tuning=True,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=48,
        ),
    ),
    "phi3": ("phi3", dict(sliding_window=12, num_hidden_layers=3)),
}
SWEPT = ("gemma3_text", "gpt_oss", "llama4_text")
SWEPT_HERE = [name if name in SWEPT else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
METHODS = ("ar", "tokenswift", "medusa", "triforce", "magicdec", "prompt-lookup", "draft-model", "auto")
LENGTH = 30
# Draft caches of fewer tokens than the text has.
NARROW = TokenSwiftOptions(tree=(2, 2, 1), ngrams=2, budget=24, sink=4)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Windows move, and cannot go back far, in texts of some dozen tokens."""
    monkeypatch.setattr(window, "_BACK", 3)
    monkeypatch.setattr(window, "_AHEAD", 6)


@pytest.fixture(scope="module")
def decoders():
    """By family its decoder, made once."""
    made = {}

    def decoder_of(name):
        if name not in made:
            model_type, overrides = FAMILIES[name]
            model, small = (tiny(model_type, **overrides) for _ in range(2))
            model.set_attn_implementation("eager")  # others may leave out caps
            for parameter in small.parameters():
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            made[name] = Decoder(model, heads=random_heads(model), draft_model=small, prefix_cache_bytes=2**24)
        return made[name]

    return decoder_of


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_transformers_own(decoders, prompt, name):
    dec = decoders(name)
    expected = transformers_text(dec.model, prompt, LENGTH)
    assert len(set(expected)) > 5
    for method in ("ar", "tokenswift"):
        assert dec.generate(prompt, LENGTH, method, SamplingParams(temperature=0), NARROW).token_ids == expected


@pytest.mark.parametrize("name", SWEPT_HERE)
def test_every_method_equals_ar(decoders, prompt, name):
    check_methods(decoders(name), prompt, LENGTH, METHODS, NARROW)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_method_and_tree_equals_ar_in_longer_texts(decoders, prompt, name):
    check_methods(decoders(name), prompt, 2 * LENGTH, METHODS, NARROW)
    check_methods(decoders(name), prompt, 2 * LENGTH, METHODS, TokenSwiftOptions(budget=24, sink=4))


def check_methods(dec, prompt, length, methods, options):
    greedy = SamplingParams(temperature=0)
    expected = transformers_text(dec.model, prompt, length)
    sampling = SamplingParams(seed=3, min_p=0.02, repetition_penalty=1.2, penalty_window=16)
    sampled = dec.generate(prompt, length, "ar", sampling)
    for method in methods:
        assert (method, dec.generate(prompt, length, method, greedy, options).token_ids) == (method, expected)
        assert (method, dec.generate(prompt, length, method, sampling, options).token_ids) == (
            method,
            sampled.token_ids,
        )
    assert dec.audit(sampled).equal


@pytest.mark.parametrize("name", SWEPT_HERE)
def test_drafts_from_the_whole_text_are_right_every_time(decoders, prompt, name):
    """The draft pass is the model itself: what windows hold, temperatures, caps and shared keys included."""
    options = TokenSwiftOptions(tree=(1, 1, 1, 1), budget=100)
    out = decoders(name).generate(prompt, LENGTH, "magicdec", SamplingParams(seed=5), options)
    assert out.stats.steps == LENGTH // 5


@pytest.mark.parametrize("name", SWEPT_HERE)
def test_texts_together_are_those_alone(decoders, prompt, name):
    dec, sampling = decoders(name), SamplingParams(seed=3)
    prompts = [prompt[:9], prompt, [*prompt, *prompt[::-1]]]
    alone = [dec.generate(one, LENGTH, "ar", sampling).token_ids for one in prompts]
    for method in ("tokenswift", "auto"):
        together = dec.generate_batch(prompts, LENGTH, method, sampling, NARROW)
        assert [out.token_ids for out in together] == alone


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("name", SWEPT_HERE)
def test_a_reused_beginning_changes_nothing(decoders, prompt, name, kv_dtype):
    """Whole where the text goes on, in part where a window still holds what is seen, else not at all."""
    dec, sampling = decoders(name), SamplingParams(seed=4)
    options = TokenSwiftOptions(tree=(2, 1), kv_dtype=kv_dtype, offload=kv_dtype is None)
    fresh = Decoder(dec.target.model)
    text = [*prompt, *fresh.generate(prompt, LENGTH, "ar", sampling, options).token_ids]
    reused = []
    for given in (prompt, text, text[:70], [*text[:30], *prompt], [*text, *prompt]):
        expected = fresh.generate(given, 20, "ar", sampling, options)
        out = dec.generate(given, 20, "prompt-lookup", sampling, options)
        assert out.token_ids == expected.token_ids
        reused.append(out.stats.reused_tokens)
    assert not reused[0] and reused[1] > len(prompt)


@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_text_that_turns_off_just_before_its_window_moved_reads_on_at_length(decoders, prompt, back):
    """The window has given up what it would keep for going back, and has no room for all that comes in one pass."""
    model, sampling = decoders("mistral").model, SamplingParams(seed=4)
    fresh, dec = Decoder(model), Decoder(model, prefix_cache_bytes=2**24)
    text = [*prompt[:17], *dec.generate(prompt[:17], 33, "ar", sampling).token_ids]
    given = [*text[:-back], *prompt]
    out = dec.generate(given, 8, "ar", sampling)
    assert out.stats.reused_tokens == len(text) - back - 1
    assert out.token_ids == fresh.generate(given, 8, "ar", sampling).token_ids


def test_windows_that_no_text_fills_stay_apart_where_their_heads_are_others(prompt):
    model_type, overrides = FAMILIES["gemma4_text"]
    model = tiny(model_type, **overrides | dict(sliding_window=512))
    model.set_attn_implementation("eager")
    dec = Decoder(model)
    out = dec.generate(prompt, 10, "magicdec", SamplingParams(temperature=0), NARROW)
    assert out.token_ids == transformers_text(dec.model, prompt, 10)


def grown(state, text, new):
    """Let a state run a pass over ``new`` tokens, numbers behind the ``text``, and check what they attend to."""
    entries = torch.tensor(new).view(1, 1, -1, 1)
    state.make_room(len(new))
    seen = text[state.kind.first_seen(len(text)) :] + new
    for held in state.update(entries, entries, 0, 0):
        assert held.flatten().tolist() == seen


@pytest.mark.parametrize("name", ["window", "chunk"])
def test_what_is_seen_is_the_texts_own_whatever_was_taken_back_copied_and_begun_with(name, monkeypatch):
    """Random steps; each token is a number of its own."""
    for seed in range(60):
        rng = random.Random(seed)
        monkeypatch.setattr(window, "_BACK", rng.choice([1, 3, 7]))
        state, text, copies = WindowState(LayerKind(name, rng.choice([1, 2, 5, 8])), 1), [], []
        for first in range(0, 1000, 25):
            step = rng.choice(["pass", "pass", "pass", "back", "copy", "begin"])
            if step == "pass":
                new = list(range(first, first + rng.randint(1, 20)))
                grown(state, text, new)
                path = sorted(rng.sample(range(len(new)), rng.randint(1, len(new))))
                state.keep(path)
                text = text + [new[node] for node in path]
            elif step == "back":
                text = text[: state.goes_back_to(rng.randint(0, len(text)))]
                state.rewind(len(text))
            elif step == "copy" and (count := state.goes_back_to(len(text))):
                copies.append((state.copy(count), text[:count]))
            elif step == "begin" and copies:
                copy, begun = rng.choice(copies)
                if count := copy.goes_back_to(max(1, len(begun) - rng.randint(0, 4))):
                    state, text = WindowState(state.kind, 1), begun[:count]
                    state.begin_with(copy, count)


BIT_FOR_BIT = ("mistral", "gemma2", "gemma3_text", "gemma4_text", "exaone4", "phi3")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", BIT_FOR_BIT)
def test_the_native_library_decodes_them_bit_for_bit(with_native, prompt, name, dtype):
    model_type, overrides = FAMILIES[name]
    model = tiny(model_type, dtype, **overrides)
    dec, sampling = Decoder(model, heads=random_heads(model), bitwise=True), SamplingParams(seed=1)
    expected = dec.generate(prompt, 3 * LENGTH, "ar", sampling).token_ids
    assert dec.target.backend.name == NATIVE
    for method in ("tokenswift", "magicdec"):
        assert (method, dec.generate(prompt, 3 * LENGTH, method, sampling, NARROW).token_ids) == (method, expected)


@pytest.mark.parametrize("kinds", [["full_attention"] * 3, ["sliding_attention", "full_attention"] * 2])
def test_a_configuration_that_says_what_the_model_does_not_do_is_refused(kinds):
    """Mistral's modules have their window in every layer, whatever a configuration lists."""
    model = tiny("mistral", **SLIDING)
    model.config.layer_types = kinds[:3]
    with pytest.raises(ValueError, match=r"^mistral has another mask in a layer than its configuration says"):
        Decoder(model)


@torch.inference_mode()
def test_windows_stay_as_large_however_long_the_text(decoders, prompt):
    """Of three layers the one that attends to the whole text grows with it, and the plan knows."""
    dec, held = decoders("gemma3_text"), []
    for count in (1, 8):
        cache = FullCache(8 * len(prompt), growable=True)
        for _ in range(count):
            dec.target.prefill(prompt, cache)
        (state,) = cache.states.values()
        held.append(state.nbytes)
        assert state.length == count * len(prompt)
        assert held[-1] <= dec.target.beside_bytes(8 * len(prompt))
    assert held[0] == held[1]
