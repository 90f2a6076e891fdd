"""Bit for bit: a token's logits depend on the tokens before it, and on nothing that shares its pass."""

import functools
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.cache.blocks import Blocks
from decoder.cache.full import FullCache
from decoder.kernels import attention, native, packed_weight
from decoder.kernels.bitwise_attention import COLUMNS, DEPTH, SHORT, SPARE, STRIDE, BitwiseText, Rule, tail_start
from decoder.kernels.bitwise_batch import BatchedTexts
from decoder.kernels.bitwise_pass import attend_text, attend_texts
from decoder.kernels.packed_linear import product_of
from decoder.kernels.self_test import AttentionShape
from decoder.model import bitwise, bitwise_attention_test, bitwise_test, target
from decoder.model.bitwise_attention_test import OneLayer
from decoder.model.model_pass import ModelPass
from decoder.model.native_layer import NativeLayer
from decoder.model.native_pass import NativePass
from decoder.sampling.token_tree import TokenTree

from .conftest import VOCAB, all_heads, tiny_llama
from .test_families import FAMILIES, ONCE_EACH, tiny

DTYPES = [torch.float32, torch.bfloat16]
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=3, min_p=0.05, repetition_penalty=1.1, penalty_window=20),
    SamplingParams(temperature=0.7, seed=5),
]
RULE = Rule(4, 160)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def exact(request):
    model = tiny_llama(request.param)
    small = tiny_llama(request.param, seed=2, num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
    return Decoder(model, heads=all_heads(model), draft_model=small, bitwise=True)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(VOCAB, (70,), generator=torch.Generator().manual_seed(4)).tolist()


def random_tree(nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    tree = TokenTree(0)
    while len(tree) < nodes:
        parent = int(torch.randint(max(0, len(tree) - 4), len(tree), (), generator=generator))
        tree.add(parent, len(tree), "test")
    return tree


def random_pairs(length, dtype, heads=6, kv_heads=2, dim=16, nodes=24):
    generator = torch.Generator().manual_seed(length)
    sizes = [(kv_heads, length + nodes + SPARE), (kv_heads, length + nodes + SPARE), (heads, nodes)]
    return [torch.randn(1, *size, dim, generator=generator).to(dtype) for size in sizes]


# Around every border of a tail's beginning, and of where blocks take the prefix over.
BORDERS = [
    0,
    1,
    31,
    32,
    63,
    64,
    65,
    COLUMNS - 2,
    COLUMNS - 1,
    COLUMNS,
    COLUMNS + 1,
    127,
    128,
    129,
    300,
    SHORT + DEPTH - 1,
    SHORT + DEPTH,
    SHORT + DEPTH + STRIDE + 8,
]


@pytest.mark.parametrize("rule", [RULE, Rule(16, 0)], ids=["in order", "gathered, sixteen rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", BORDERS)
def test_attention_gives_a_node_the_bits_it_has_alone(length, dtype, rule):
    key, value, query = random_pairs(length, dtype)
    for tree in (random_tree(24, length), random_tree(5, length + 1)):
        mask = tree.ancestor_mask()
        text = BitwiseText(OneLayer(key, value), length, tree.depths, mask, rule)
        together = attend_text(text, query[:, :, : len(tree)], 0, 0.3)
        for node, depth in enumerate(tree.depths):
            # Its own text, as plain decoding has it.
            path = tree.path(node)
            own = [pairs.clone() for pairs in (key, value)]
            for mine, theirs in zip(own, (key, value), strict=True):
                mine[:, :, length : length + len(path)] = theirs[:, :, [length + at for at in path]]
            text = BitwiseText(OneLayer(*own), length + depth, [0], None, rule)
            alone = attend_text(text, query[:, :, node : node + 1], 0, 0.3)
            assert torch.equal(alone[:, :, 0], together[:, :, node]), (node, depth)


@pytest.mark.parametrize("length", BORDERS)
def test_a_run_of_any_length_gives_the_same_bits_and_those_of_softmax(length):
    key, value, query = random_pairs(length, torch.float32)
    whole = attend_text(BitwiseText(OneLayer(key, value), length, range(24), None, RULE), query, 0, 0.3)
    for first, end in ((0, 1), (3, 10), (10, 24)):
        part = BitwiseText(OneLayer(key, value), length + first, range(end - first), None, RULE)
        part = attend_text(part, query[:, :, first:end], 0, 0.3)
        assert torch.equal(part, whole[:, :, first:end])
    blocked = torch.ones(24, 24, dtype=torch.bool).triu(1)
    wide = (x[:, :, : length + 24].double() for x in (key, value))
    expected = attention._one_softmax(query.double(), *wide, blocked, 0.3)
    assert torch.allclose(whole.double(), expected, atol=1e-5)


SHAPE = AttentionShape(6, 2, 16, 16, torch.float32)


def texts_beside_each_other(rule, lengths, nodes):
    """For each text its filled cache, length, depths and mask; all caches are in one block where they can be."""
    generator = torch.Generator().manual_seed(sum(lengths))
    blocks, texts = Blocks(), []
    for length, count in zip(lengths, nodes, strict=True):
        tree = random_tree(count, length)
        cache = FullCache(max(lengths) + max(nodes))
        cache.beside = blocks
        cache.prepare(1, spare=SPARE)
        cache.begin_with([torch.randn(1, 1, 2, length + count, 16, generator=generator) for _ in range(2)], SHAPE, CPU)
        cache.make_finite(length + count + SPARE)
        texts.append((cache, length, tree.depths, tree.ancestor_mask()))
    return texts


@pytest.mark.parametrize("lengths", [(3, 40, 200, 90), (250, 500, 10, 600), (700, 100, 1500, 2900)], ids=str)
@pytest.mark.parametrize("nodes", [(1, 1, 1, 1), (5, 1, 12, 2)], ids=["plain", "trees"])
def test_texts_that_share_products_have_the_bits_they_have_alone(lengths, nodes):
    """Also where the cache of an ended text stands between theirs, and whatever it holds."""
    rule = bitwise_attention_test.attention_rule(SHAPE)[0]
    if not rule.batched:
        pytest.skip("on this machine sums over columns do not keep their order")
    texts = texts_beside_each_other(rule, lengths, nodes)
    query = torch.randn(sum(nodes), 6, 16, generator=torch.Generator().manual_seed(1))
    rows = dict(enumerate(query.split(nodes)))

    def attend(numbers):
        own = [BitwiseText(*texts[number], rule) for number in numbers]
        given = torch.cat([rows[number] for number in numbers])
        output = attend_texts(own, given, 6, 0, 0.3, all_together=True)
        assert any(isinstance(part, BatchedTexts) for part in own[0].plan[1].parts)
        return output.split([nodes[number] for number in numbers])

    alone = {}
    for number, text in enumerate(texts):
        heads = rows[number].transpose(0, 1)[None]
        apart = OneLayer(*(pairs[0].contiguous() for pairs in (text[0].keys, text[0].values)))
        alone[number] = attend_text(BitwiseText(apart, *text[1:], rule), heads, 0, 0.3)[0].transpose(0, 1).flatten(1)
    for number, output in enumerate(attend(range(4))):
        assert torch.equal(output, alone[number])
    texts[1][0].keys.fill_(torch.nan)
    texts[1][0].values.fill_(torch.nan)
    for number, output in zip((3, 0, 2), attend((3, 0, 2)), strict=True):
        assert torch.equal(output, alone[number])


def test_texts_share_products_only_where_that_is_faster():
    """A long text, or one with many nodes, would make all others take as many columns and rows."""
    rule = RULE._replace(batched=True)

    def batched(lengths, nodes):
        texts = [BitwiseText(*text, rule) for text in texts_beside_each_other(rule, lengths, nodes)]
        attend_texts(texts, torch.randn(sum(nodes), 6, 16), 6, 0, 0.3)
        return [
            sorted(number for number, _, _ in part.sources if number is not None)
            for part in texts[0].plan[1].parts
            if isinstance(part, BatchedTexts)
        ]

    assert batched((30, 90, 60, 100), (1, 1, 1, 1)) == [[0, 1, 2, 3]]
    assert batched((30, 90, 3500, 100), (1, 1, 1, 1)) != [[0, 1, 2, 3]]
    assert batched((30, 90, 60, 100), (1, 1, 24, 1)) != [[0, 1, 2, 3]]
    assert batched((3500, 90), (1, 1)) == []
    # Sums over as many columns as the second text has before its tail have an order of their own.
    rule = rule._replace(uneven=(224, 384))
    assert batched((30, 330, 60, 500), (1, 1, 1, 1)) == [[0, 2, 3]]
    # In the dtype of half precision the prefix has a product of its own.
    texts = [BitwiseText(*text, rule) for text in texts_beside_each_other(rule, (30, 90), (1, 1))]
    attend_texts(texts, torch.randn(2, 6, 16).bfloat16(), 6, 0, 0.3)
    assert not any(isinstance(part, BatchedTexts) for part in texts[0].plan[1].parts)


def test_no_tail_begins_behind_the_shallowest_ancestor():
    for position in range(500):
        start = tail_start(position)
        assert start % STRIDE == 0 and (start == 0 or position - start >= DEPTH) and position - start < COLUMNS


@pytest.fixture(scope="module")
def plain_of(exact, prompt):
    """Plain decoding with a sampling, once for all methods."""
    return functools.cache(
        lambda sampling: exact.generate(prompt, 30, "ar", sampling, return_logprobs=True, top_logprobs=5)
    )


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("sampling, tree", list(zip(SAMPLINGS, [(1,) * 4, (1, 2, 2), (3, 2)], strict=True)))
def test_every_method_gives_the_bits_of_plain_decoding(exact, prompt, plain_of, method, sampling, tree):
    plain = plain_of(sampling)
    options = TokenSwiftOptions(tree=tree, budget=40)
    out = exact.generate(prompt, 30, method, sampling, options, return_logprobs=True, top_logprobs=5)
    assert exact.bitwise
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)
    assert out.top_logprobs == plain.top_logprobs


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_chunks_of_the_prompt_make_no_difference(exact, prompt, chunk, monkeypatch):
    """Beside a prompt that is one chunk."""
    prompt = 8 * prompt + prompt[:30]
    monkeypatch.setattr(target, "_PREFILL_CHUNK", len(prompt))
    plain = exact.generate(prompt, 30, "ar", SAMPLINGS[1], return_logprobs=True)
    monkeypatch.setattr(target, "_PREFILL_CHUNK", chunk)
    again = exact.generate(prompt, 30, "suffix", SAMPLINGS[1], return_logprobs=True)
    assert (again.token_ids, again.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.parametrize("cut", [1, 7, 29])
def test_a_resumed_text_has_the_bits_of_the_uncut_one(exact, prompt, cut):
    plain = exact.generate(prompt, 30, "ar", SAMPLINGS[1], return_logprobs=True)
    rest = exact.generate(prompt + plain.token_ids[:cut], 30 - cut, "auto", SAMPLINGS[1], return_logprobs=True)
    assert (rest.token_ids, rest.logprobs) == (plain.token_ids[cut:], plain.logprobs[cut:])


def test_a_cache_that_grows_makes_no_difference(exact, prompt, monkeypatch):
    plain = exact.generate(prompt, 200, "ar", SAMPLINGS[1], return_logprobs=True)
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    chunks, tokens = exact.stream(prompt, None, "suffix", SAMPLINGS[1]), []
    while len(tokens) < 200:
        tokens += next(chunks).token_ids
    chunks.close()
    assert tokens[:200] == plain.token_ids


def test_texts_decoded_together_have_the_bits_they_have_alone(exact, prompt):
    prompts = [prompt[:end] for end in (1, 70, 33, 12)]
    params = [SAMPLINGS[index % 3] for index in range(4)]
    alone = [
        exact.generate(*text, "ar", how, return_logprobs=True)
        for *text, how in zip(prompts, [40] * 4, params, strict=True)
    ]
    for method in ("ar", "suffix", "tokenswift-fused" if "gated" in exact.heads else "tokenswift"):
        outs = exact.generate_batch(prompts, 40, method, params, return_logprobs=True)
        assert [(out.token_ids, out.logprobs) for out in outs] == [(out.token_ids, out.logprobs) for out in alone]


@pytest.mark.parametrize(
    "widths", [((2, 1, None),), ((3, 3, None),), ((16, 16, 16),)], ids=["two or more", "by three", "sixteen each"]
)
def test_padded_passes_give_the_same_text(prompt, monkeypatch, widths):
    """The rules of machines whose products depend on the number of rows, held to on one whose do not."""
    monkeypatch.setattr(bitwise, "_WIDTHS", widths)
    monkeypatch.setattr(bitwise_test, "free_counts", lambda target, rule: frozenset({4, 7}))
    dec = Decoder(tiny_llama(torch.float32), bitwise=True)
    counts, run = [], ModelPass.run

    def counted(own, module, ids, *rest):
        if module is dec.model:
            counts.append(ids.shape[1])
        return run(own, module, ids, *rest)

    monkeypatch.setattr(ModelPass, "run", counted)
    plain = dec.generate(prompt, 40, "ar", SAMPLINGS[1], return_logprobs=True)
    for method, tree in product(("suffix", "prompt-lookup", "magicdec"), ((1, 2, 2), (4, 4, 4))):
        options = TokenSwiftOptions(tree=tree, budget=40)
        out = dec.generate(prompt, 40, method, SAMPLINGS[1], options, return_logprobs=True)
        assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)
    for method in ("suffix", "ar"):
        outs = dec.generate_batch([prompt, prompt[:5]], 40, method, SAMPLINGS[1], return_logprobs=True)
        assert outs[0].logprobs == plain.logprobs
    [(least, multiple, most)] = widths
    assert min(counts) == least and (most is None or max(counts) == most)
    assert all(count % multiple == 0 or count in (4, 7) for count in counts) and (multiple != 3 or 4 in counts)


def test_the_numbers_of_rows_that_need_no_padding_are_found(monkeypatch, without_native):
    """On a machine whose products differ at 1, 2, 5 and 31 rows, and at other numbers beyond the small ones."""
    product = packed_weight.OneDnnWeight.__call__

    def leaning_product(self, x):
        return product(self, x) * (1 + 2**-20 * (x.shape[-2] in (1, 2, 5, 31, 121)))

    monkeypatch.setattr(packed_weight.OneDnnWeight, "__call__", leaning_product)
    rule = Decoder(tiny_llama(torch.float32), bitwise=True).target.bitwise.rule
    assert rule.multiple == 3 and {4, 7, 8, 10, 32} <= rule.free and not {5, 31} & rule.free
    assert [rule.padding(count) for count in (1, 2, 3, 4, 5, 31, 121)] == [2, 1, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ONCE_EACH)
def test_families_hold_it_or_say_why_not(name, dtype):
    model_type, overrides = FAMILIES[name]
    dec = Decoder(tiny(model_type, dtype, **overrides))
    if "experts" in " ".join(name for name, _ in dec.model.named_modules()):
        assert not dec.bitwise and "mixture of experts" in dec.target.bitwise.reason
    if not dec.bitwise:
        assert "bit for bit" in dec.report() and dec.target.bitwise.reason
        with pytest.raises(ValueError, match="bitwise cannot be had here"):
            Decoder(dec.model, bitwise=True)
        return
    prompt = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = dec.generate(prompt, 16, "ar", SAMPLINGS[1], return_logprobs=True)
    for method in ("suffix", "magicdec"):
        out = dec.generate(prompt, 16, method, SAMPLINGS[1], TokenSwiftOptions(budget=24), return_logprobs=True)
        assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)


def leaning(function):
    """A function that adds a little to all rows but a lone one, as another order of sums would."""

    def row_dependent(x, *args, **kwargs):
        y = function(x, *args, **kwargs)
        return y if x.shape[-2] == 1 else y * (1 + 2**-8)

    return row_dependent


@pytest.mark.parametrize(
    "part",
    ["norm", "activation", "linear", "rotary", "residual", "head", "softmax", "attention", "layer", "pass"],
)
def test_an_operator_that_depends_on_its_rows_is_caught(part, monkeypatch, request):
    request.getfixturevalue("without_native" if part == "softmax" else "with_native")
    model = tiny_llama(torch.float32)
    layer = model.model.layers[1]
    if part in ("attention", "layer"):
        monkeypatch.setattr(NativePass, "runs", lambda *given: False)
    if part == "norm":
        layer.input_layernorm.forward = leaning(layer.input_layernorm.forward)
    elif part == "activation":
        layer.mlp.act_fn = type("Leaning", (nn.Module,), {"forward": staticmethod(leaning(functional.silu))})()
    elif part == "linear":
        layer.mlp.down_proj.forward = leaning(layer.mlp.down_proj.forward)
    elif part == "rotary":
        rotary = model.model.rotary_emb
        turn = rotary.forward
        rotary.forward = lambda x, position_ids: tuple(
            one * (1 + 2**-8 * (x.shape[1] > 1)) for one in turn(x, position_ids)
        )
    elif part == "residual":
        layer.register_forward_hook(lambda module, args, out: out * (1 + 2**-8 * (out.shape[1] > 1)))
    elif part == "head":
        model.lm_head.register_forward_hook(lambda module, args, out: out * (1 + 2**-8 * (out.shape[-2] > 1)))
    elif part == "attention":
        attend = attention.native_attention
        monkeypatch.setattr(
            attention, "native_attention", lambda heads, *given: attend(heads, *given) * (1 + 2**-8 * (len(heads) > 1))
        )
    elif part == "layer":
        behind = NativeLayer.behind_attention
        monkeypatch.setattr(
            NativeLayer,
            "behind_attention",
            lambda self, attended, x: behind(self, attended, x) * (1 + 2**-16 * (x.shape[1] > 1)),
        )
    elif part == "pass":
        run = NativePass.__call__

        def leaning_pass(self, states, *given):
            run(self, states, *given)
            states.mul_(1 + 2**-16 * (states.shape[1] > 1))

        monkeypatch.setattr(NativePass, "__call__", leaning_pass)
    else:
        monkeypatch.setattr(bitwise_attention_test, "_rules", {})
        attend = BitwiseText.attend_rows
        monkeypatch.setattr(
            BitwiseText,
            "attend_rows",
            lambda self, *given: attend(self, *given) * (1 + 2**-8 * (self.count > 1)),
        )
    # One width for all passes would hide it, as it is meant to.
    monkeypatch.setattr(bitwise, "_WIDTHS", ((1, 1, None),))
    dec = Decoder(model)
    assert not dec.bitwise and dec.target.bitwise.reason
    with pytest.raises(ValueError, match=r"bitwise cannot be had here: .*(row|token|text)"):
        Decoder(model, bitwise=True)


def test_a_product_whose_difference_rounding_mostly_hides_is_caught(monkeypatch):
    """In bfloat16 it shows once in many rows, and a text meets it sooner or later."""
    for kind in (packed_weight.HalfWeight, packed_weight.OneDnnWeight, packed_weight.NativeWeight):
        product = kind.__call__
        monkeypatch.setattr(
            kind, "__call__", lambda self, x, product=product: product(self, x) * (1 + 2**-20 * (x.shape[-2] == 1))
        )
    monkeypatch.setattr(bitwise, "_WIDTHS", ((1, 1, None),))
    if packed_weight.onednn_dtype(torch.bfloat16) == torch.float32 and not native.multiplies(torch.bfloat16):
        assert not Decoder(tiny_llama(torch.bfloat16)).bitwise
    assert not Decoder(tiny_llama(torch.float32)).bitwise


def test_passes_of_one_width_make_up_for_such_an_operator(prompt):
    model = tiny_llama(torch.float32)
    model.model.layers[1].mlp.down_proj.forward = leaning(model.model.layers[1].mlp.down_proj.forward)
    dec = Decoder(model, bitwise=True)
    plain = dec.generate(prompt, 40, "ar", SAMPLINGS[1], return_logprobs=True)
    out = dec.generate(prompt, 40, "suffix", SAMPLINGS[1], return_logprobs=True)
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)


def test_what_changes_after_loading_is_tested_again(prompt, monkeypatch, libraries):
    model = tiny_llama(torch.float32)
    auto, demanded = Decoder(model), Decoder(model, bitwise=True)
    assert auto.bitwise and demanded.bitwise
    with torch.autocast("cpu", torch.bfloat16):
        auto.generate(prompt, 3, "ar")
        assert not auto.bitwise and "autocast" in auto.report()
        with pytest.raises(ValueError, match="bitwise cannot be had here: autocast"):
            demanded.generate(prompt, 3, "ar")
    auto.generate(prompt, 3, "ar")
    assert auto.bitwise
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        auto.generate(prompt, 3, "ar")
        assert auto.bitwise
    finally:
        torch.set_num_threads(threads)
    hook = model.model.layers[0].register_forward_hook(
        lambda module, args, out: out * (1 + 2**-6 * torch.rand(()).item())
    )
    auto.generate(prompt, 3, "ar")
    assert not auto.bitwise
    hook.remove()
    auto.generate(prompt, 3, "ar")
    assert auto.bitwise
    tested = []
    rule, name = bitwise_attention_test.attention_rule, "attention_rule"
    if auto.target.attends_natively:
        rule, name = bitwise_attention_test.native_fault, "native_fault"
    monkeypatch.setattr(bitwise_attention_test, name, lambda shape: (tested.append(shape.dtype), rule(shape))[1])
    model.bfloat16()
    plain = auto.generate(prompt, 20, "ar", SAMPLINGS[0], return_logprobs=True)
    drafted = auto.generate(prompt, 20, "suffix", SAMPLINGS[0], return_logprobs=True)
    assert tested == [torch.bfloat16] and auto.bitwise
    assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.parametrize("change", ["autocast", "threads"])
def test_what_changes_while_a_text_is_generated_is_told(prompt, change, caplog):
    auto, demanded = (Decoder(tiny_llama(torch.float32), bitwise=wanted) for wanted in ("auto", True))
    threads = torch.get_num_threads()
    streams = [dec.stream(prompt, 40, "suffix", ignore_eos=True) for dec in (auto, demanded)]
    for stream in streams:
        next(stream)
    try:
        if change == "threads":
            torch.set_num_threads(threads + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
            assert sum(len(chunk.token_ids) for chunk in streams[0]) > 20
            assert not auto.bitwise and f"{change} changed while a text was generated" in auto.report()
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            with pytest.raises(ValueError, match=f"bitwise does not hold any more: .*{change} changed"):
                next(streams[1])
    finally:
        torch.set_num_threads(threads)
    for dec in (auto, demanded):
        dec.generate(prompt, 3, "ar")
        assert dec.bitwise


@pytest.mark.parametrize("change", ["class", "hook"])
def test_what_replaces_a_layer_from_outside_takes_effect(prompt, change, monkeypatch):
    """Another forward in the class, and a hook on all modules."""
    model = tiny_llama(torch.float32)
    dec, mlp = Decoder(model), type(model.model.layers[0].mlp)
    before = dec.generate(prompt, 20, "ar", SAMPLINGS[0]).token_ids
    if change == "class":
        monkeypatch.setattr(mlp, "forward", lambda self, x: self.down_proj(functional.relu(self.gate_proj(x))))
        handle = None
    else:

        def doubled(module, args, out):
            return 2 * out if isinstance(module, mlp) else None

        handle = nn.modules.module.register_module_forward_hook(doubled)
    try:
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
        drafted = dec.generate(prompt, 20, "suffix", SAMPLINGS[0]).token_ids
    finally:
        if handle is not None:
            handle.remove()
    assert drafted == expected != before


def test_auto_leaves_it_off_where_it_is_dear(monkeypatch):
    model = tiny_llama(torch.float32)
    model.model.layers[1].mlp.down_proj.forward = leaning(model.model.layers[1].mlp.down_proj.forward)
    monkeypatch.setattr(bitwise_test, "_seconds", lambda *given: (1.0, 1.9))
    dec = Decoder(model)
    assert not dec.bitwise and "take 1.9 times as long" in dec.target.bitwise.reason
    assert Decoder(model, bitwise=True).bitwise


def test_a_head_without_weights_is_refused_in_a_sentence():
    model = torch.ao.quantization.quantize_dynamic(tiny_llama(torch.float32), {nn.Linear})
    with pytest.raises(ValueError, match=r"the language-model head .* quantise the other layers alone"):
        Decoder(model)


def test_weights_that_another_library_packs_are_tested_again(prompt, monkeypatch):
    """Half precision holds some weights and not others, and its products need other numbers of rows."""
    model = tiny_llama(torch.float32)
    dec = Decoder(model)
    before = {packed.kind for packed in map(product_of, dec.target.replacements().layers.values()) if packed}
    found = []
    find = bitwise.Bitwise._find
    monkeypatch.setattr(bitwise.Bitwise, "_find", lambda rules: (found.append(1), find(rules))[1])
    dec.generate(prompt, 3, "ar")
    assert not found
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    plain = dec.generate(prompt, 30, "ar", SAMPLINGS[0], return_logprobs=True)
    after = {packed.kind for packed in map(product_of, dec.target.replacements().layers.values()) if packed}
    assert bool(found) == (before != after)
    drafted = dec.generate(prompt, 30, "suffix", SAMPLINGS[0], return_logprobs=True)
    if dec.bitwise:
        assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)
    assert bitwise_test.products_fault(dec.target, dec.target.bitwise.rule) is None


def test_float64_and_switching_off(prompt):
    assert not Decoder(tiny_llama()).bitwise
    assert not Decoder(tiny_llama(torch.float32), bitwise=False).bitwise
    with pytest.raises(ValueError, match="bitwise must be True, False or 'auto', not 'yes'"):
        Decoder(tiny_llama(), bitwise="yes")
    with pytest.raises(ValueError, match="bitwise must be True, False or 'auto', not 1"):
        Decoder(tiny_llama(), bitwise=1)


def test_slots_nobody_wrote_to_are_finite(exact, prompt):
    """Uninitialised memory may hold anything, and zero times that is no number."""
    empty = torch.Tensor.new_empty

    def dirty(like, *sizes, **kwargs):
        made = empty(like, *sizes, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", dirty)
        out = exact.generate(prompt, 30, "suffix", SAMPLINGS[1], return_logprobs=True)
    plain = exact.generate(prompt, 30, "ar", SAMPLINGS[1], return_logprobs=True)
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)


def test_trees_are_no_deeper_than_tails_reach(exact):
    """A text that repeats itself would be drafted as deep as is asked for."""
    out = exact.generate(
        [1, 2, 3] * 60,
        100,
        "magicdec",
        SAMPLINGS[0],
        TokenSwiftOptions(tree=(1,) * 100, ngrams=0),
        return_logprobs=True,
    )
    plain = exact.generate([1, 2, 3] * 60, 100, "ar", SAMPLINGS[0], return_logprobs=True)
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)


def test_a_cache_has_spare_slots_of_finite_numbers():
    cache = FullCache(10)
    cache.prepare(1, spare=SPARE)
    key = torch.randn(1, 2, 10, 4)
    keys, values = cache.update(key, key, 0)
    assert keys.shape[2] == 10 + SPARE and keys.isfinite().all() and values.isfinite().all()
