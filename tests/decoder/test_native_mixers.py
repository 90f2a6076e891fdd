"""Recurrent layers in the native library: a token's bits follow from its text, however it came there."""

import random

import pytest
import torch

from decoder import Decoder, SamplingParams
from decoder.backends.base import Chain, PassBatch, Tree
from decoder.backends.native.backend import NATIVE as NATIVE_BACKEND
from decoder.backends.native.state_updates import _state_update, quicker
from decoder.backends.reference.backend import Reference
from decoder.backends.reference.mixers import mixers_of
from decoder.cache.full import FullCache
from decoder.cache.streaming import RecentCache
from decoder.sampling.token_tree import TokenTree
from decoder.work import finish

from .conftest import VOCAB, random_heads, random_tokens, some, tiny_llama, transformers_text
from .recurrent_models import ALL, NATIVE, OFTEN, made
from .test_families import tiny

pytestmark = pytest.mark.usefixtures("with_native")
TEXT = 160


@pytest.fixture(scope="module", params=some(NATIVE, OFTEN))
def target(request):
    return Decoder(made(request.param), prefix_cache_bytes=0).target


class Wandering:
    """Reads a text in chains, trees and drafts of random lengths, goes back, and begins anew from copies.

    Each token's logits are compared with those of a text that was read token by token.
    """

    def __init__(self, target, seed):
        self.target, self.draw = target, random.Random(seed)
        self.text = [self.draw.randrange(VOCAB) for _ in range(TEXT)]
        cache, self.plain = FullCache(TEXT), []
        for position, token in enumerate(self.text):
            self.plain.append(self.run(Tree(TokenTree(token), cache))[0])
            cache.keep([0])
            assert cache.length == position + 1
        self.cache = FullCache(TEXT + 50, takes_back=seed % 2 == 1)

    def run(self, text):
        return self.target.backend.run(PassBatch([text], True)).logits.clone()

    def check(self, logits, first):
        plain = self.plain[first : first + len(logits)]
        assert plain and all(torch.equal(*pair) for pair in zip(logits, plain, strict=True))

    def chain(self):
        first = self.cache.length
        tokens = self.text[first : first + self.draw.randint(1, 50)]
        if tokens:
            self.check(self.run(Chain(tokens, first, self.cache)), first)
            self.cache.keep(range(len(tokens)))

    def tree(self):
        first, end = self.cache.length, min(TEXT, self.cache.length + self.draw.randint(1, 6))
        if first == end:
            return
        tree, path = TokenTree(self.text[first]), [0]
        for token in self.text[first + 1 : end]:
            for _ in range(self.draw.randrange(5)):
                tree.add(self.draw.randrange(len(tree)), VOCAB + self.draw.randrange(VOCAB), "test")
            path.append(tree.add(path[-1], token, "test"))
        for _ in range(self.draw.randrange(5)):
            tree.add(self.draw.randrange(len(tree)), VOCAB + self.draw.randrange(VOCAB), "test")
        tree.tokens[:] = [token % VOCAB for token in tree.tokens]
        logits = self.run(Tree(tree, self.cache))
        self.check(logits[path], first)
        self.cache.keep(path[: self.draw.randint(1, len(path))])

    def draft(self):
        """Draft passes over the text's states, of which nothing stays."""
        recent = RecentCache(32, 4, 30)
        recent.append(self.cache)
        for count in range(self.draw.randint(1, 4)):
            recent.hold(count)
            self.run(Chain([self.draw.randrange(VOCAB)], self.cache.length + count, recent))
        recent.hold(0)
        self.run(Chain([1] * self.draw.randint(1, 30), self.cache.length, recent))

    def mark(self):
        self.cache.mark()

    def back(self):
        length = self.cache.rewind(max(0, self.cache.length - self.draw.randrange(20)))
        assert length == self.cache.length and (not length or self.cache.recurrent.length == length)

    def anew(self):
        count = self.cache.goes_back_to(self.draw.randint(0, self.cache.length))
        if count:
            copies = finish(self.cache.copying(count))
            count = copies.goes_back_to(self.draw.randint(count // 2, count))
            self.cache = FullCache(TEXT + 50, takes_back=self.cache.takes_back)
            if count:
                finish(self.target.beginning_with(self.cache, copies, count, self.target.dtype))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 50))])
def test_bits_are_plain_decodings_however_a_text_is_read(target, seed):
    with torch.inference_mode(), target.patched():
        one = Wandering(target, seed)
        steps = [one.chain, one.tree, one.tree, one.tree, one.draft, one.mark, one.back, one.anew]
        for _ in range(60):
            one.draw.choice(steps)()
        one.chain()
        assert one.cache.nbytes > 0


def test_the_number_of_threads_changes_no_bit(target):
    def read():
        cache, tree = FullCache(100), TokenTree(3)
        for parent in (0, 0, 1, 2, 3, 3, 5):
            tree.add(parent, 5 + len(tree), "test")
        chain = target.backend.run(PassBatch([Chain(list(range(40)), 0, cache)], True)).logits.clone()
        cache.keep(range(40))
        return chain, *(target.backend.run(PassBatch([Tree(tree, cache)], True)).logits.clone() for _ in range(2))

    threads = torch.get_num_threads()
    found = []
    with torch.inference_mode(), target.patched():
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            try:
                found.append(read())
            finally:
                torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def test_states_of_a_chain_are_kept_whole_or_not_at_all(target):
    """Of a long one no inputs are kept but those of its end."""
    with torch.inference_mode(), target.patched():
        cache = FullCache(64)
        target.backend.run(PassBatch([Chain([1] * 40, 0, cache)], False))
        with pytest.raises(ValueError, match="are not there"):
            cache.recurrent.keep(range(20))
        with pytest.raises(ValueError, match="20 drafted tokens are held"):
            cache.recurrent.begin([-1], 20)
        cache.recurrent.keep(range(40))
        assert cache.recurrent.goes_back_to(50) == 40 and cache.recurrent.goes_back_to(38) == 0


def test_a_text_whose_layers_change_is_not_gone_on_with(target):
    cache, other = FullCache(8), FullCache(8)
    reference = Reference(target)
    finish(reference.renewing())
    with torch.inference_mode(), target.patched():
        target.backend.run(PassBatch([Chain([1, 2], 0, cache)], False))
        with pytest.raises(ValueError, match="begin the text anew"):
            reference.run(PassBatch([Chain([3], 2, cache)], False))
        reference.run(PassBatch([Chain([1, 2], 0, other)], False))
        with pytest.raises(ValueError, match="begin the text anew"):
            target.backend.run(PassBatch([Chain([3], 2, other)], False))


def hook(model):
    model.model.layers[0].linear_attn.norm.register_forward_hook(lambda module, args, output: output)


def another_activation(model):
    model.model.layers[0].linear_attn.activation = "gelu"


def another_gate(model):
    model.model.layers[0].linear_attn.norm.activation = "gelu"


@pytest.mark.parametrize("change", [hook, another_activation, another_gate])
def test_a_layer_that_is_another_one_runs_through_its_module(change):
    model = made("qwen3_5_text, 32")
    change(model)
    dec, prompt = Decoder(model), random_tokens(30, 1)
    assert dec.target.backend.name == NATIVE_BACKEND and dec.target.backend.whole is None
    # Its attention gates by a sigmoid of PyTorch's, which has other bits for other numbers of rows.
    assert not dec.bitwise and "calls PyTorch's sigmoid" in dec.report()
    greedy = SamplingParams(temperature=0)
    assert dec.generate(prompt, 12, "suffix", greedy).token_ids == transformers_text(model, prompt, 12)


@pytest.mark.parametrize("gated", [False, True])
@torch.inference_mode()
def test_a_step_of_mamba2_is_that_of_transformers(gated):
    theirs = pytest.importorskip("transformers.models.bamba.modeling_bamba").mamba2_selective_state_update
    heads, size, states, groups = 6, 5, 7, 2
    state = torch.randn(1, heads, size, states)
    x, given, z = (torch.randn(1, heads, size) for _ in range(3))
    of_heads, decays = torch.randn(1, heads, 1), -torch.rand(heads)
    arguments = [x, of_heads.expand(-1, -1, size), decays[:, None, None].expand(-1, size, states)]
    arguments += [torch.randn(1, groups, states) for _ in range(2)] + [torch.randn(heads)[:, None].expand(-1, size)]
    named = dict(dt_bias=torch.randn(heads)[:, None].expand(-1, size), dt_softplus=True, z=z if gated else None)
    ours, other = state.clone(), state.clone()
    found = _state_update(None, ours, *arguments, **named)  # transformers' own is not asked
    assert torch.allclose(found, theirs(other, *arguments, **named), atol=1e-5) and torch.allclose(
        ours, other, atol=1e-5
    )
    arguments[1] = given  # a step of its own for each number of a head
    kept = state.clone()
    assert torch.equal(_state_update(theirs, kept, *arguments, **named), theirs(state, *arguments, **named))


def test_the_users_own_step_is_run():
    model_type, overrides = ALL["granitemoehybrid"]
    mixer = mixers_of(list(tiny(model_type, torch.float32, **overrides).modules()))[0]
    assert quicker(mixer) != mixer.forward
    mixer.forward = lambda *given: None
    assert quicker(mixer) is mixer.forward


BY_MODULES = ["falcon_h1", "minimax", "kimi_linear", "zamba2", "olmo_hybrid"]


@pytest.mark.parametrize("name", some(BY_MODULES, ["falcon_h1", "minimax", "kimi_linear"]))
def test_other_families_run_through_their_modules_bit_for_bit(name):
    """Each token by itself, from the state behind its parent."""
    model_type, overrides = ALL[name]
    model = tiny(model_type, torch.float32, **overrides)
    dec = Decoder(model, heads=random_heads(model), prefix_cache_bytes=1 << 22)
    assert dec.target.backend.name == NATIVE_BACKEND and dec.target.backend.whole is None and dec.bitwise, dec.report()
    prompts = [random_tokens(30, 1), [3], random_tokens(9, 2)]
    given = dict(max_new_tokens=16, sampling=SamplingParams(seed=3), ignore_eos=True, return_logprobs=True)
    plain = [dec.generate(prompt, method="ar", **given) for prompt in prompts]
    for method in ("tokenswift", "auto", "prompt-lookup"):
        found = [dec.generate(prompt, method=method, **given) for prompt in prompts]
        assert [(one.token_ids, one.logprobs) for one in found] == [(one.token_ids, one.logprobs) for one in plain], (
            method
        )
    batch = dec.generate_batch(prompts, method="prompt-lookup", **given)
    assert [(one.token_ids, one.logprobs) for one in batch] == [(one.token_ids, one.logprobs) for one in plain]


def test_models_without_such_layers_have_no_states():
    assert Decoder(tiny_llama(torch.float32)).target.backend.whole.layout.state_sizes is None


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_nothing(default):
    name = next(iter(NATIVE))
    prompt, settings = list(range(1, 30)), dict(method="suffix", ignore_eos=True)
    expected = Decoder(made(name)).generate(prompt, 40, **settings).token_ids
    model = made(name)
    torch.set_default_dtype(default)
    try:
        dec = Decoder(model)
        assert dec.target.backend.whole is not None
        assert dec.generate(prompt, 40, **settings).token_ids == expected
    finally:
        torch.set_default_dtype(torch.float32)
