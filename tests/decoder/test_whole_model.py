"""Models that the native library runs as a whole: transformers' numbers, and modules where a model is another one."""

import pytest
import torch
from torch import nn

from decoder import Decoder
from decoder.backends.native import library as native
from decoder.backends.reference.backend import Reference
from decoder.cache.full import FullCache
from decoder.sampling.token_tree import TokenTree

from .conftest import random_tokens, tiny_llama
from .recurrent_models import ALL, NATIVE
from .test_families import FAMILIES as OTHERS
from .test_families import tiny
from .test_windows import FAMILIES as WINDOWED

RECURRENT = {name: (ALL[family][0], {**ALL[family][1], **more}) for name, (family, more, _) in NATIVE.items()}
FAMILIES = {**OTHERS, **{f"{name}, windows": own for name, own in WINDOWED.items()}, **RECURRENT}
EXPERTS = ("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "granitemoe")
WHOLE = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "granite", *EXPERTS)
WHOLE_FAMILIES = [name for name in FAMILIES if FAMILIES[name][0] in WHOLE or name in RECURRENT]


pytestmark = pytest.mark.usefixtures("with_native")


def passes(dec):
    """Whether passes go through the library as a whole."""
    return getattr(dec.target.backend, "whole", None) is not None


def verified(target, prompt, tree):
    cache = FullCache(len(prompt) + target.width(len(tree)))
    with torch.inference_mode(), target.patched():
        target.prefill(prompt, cache)
        [seen] = target.forward([tree], [cache], observe=True)
    end = len(prompt) + len(tree)
    return [seen.hidden, seen.logits, *seen.queries.values(), *cache.beginning(end, target.layout.keeping)]


def some_tree():
    tree = TokenTree(3)
    for parent, token in ((0, 5), (0, 6), (1, 7), (3, 8)):
        tree.add(parent, token, "test")
    return tree


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.12)], ids=["32", "16"])
@pytest.mark.parametrize("name", WHOLE_FAMILIES)
def test_a_pass_gives_what_transformers_layers_give(name, dtype, tolerance):
    if not native.multiplies(dtype):
        pytest.skip(f"the library multiplies no {dtype} here")
    model_type, overrides = FAMILIES[name]
    prompt = random_tokens(20, 1)
    model = tiny(model_type, dtype, **overrides)
    dec = Decoder(model, bitwise=False)
    assert passes(dec)
    found = verified(dec.target, prompt, some_tree())
    dec.target.use(Reference(dec.target))
    if (model_type in EXPERTS or name in RECURRENT) and dtype == torch.bfloat16:
        tolerance *= 3  # a rounding may turn the choice of an expert, and stays in a state
    for mine, theirs in zip(found, verified(dec.target, prompt, some_tree()), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine - theirs).double().norm() <= tolerance * theirs.double().norm()


def test_models_of_float64_and_of_other_families_are_not_run_so():
    assert isinstance(Decoder(tiny_llama()).target.backend, Reference)
    assert not passes(Decoder(tiny("olmo2", torch.float32)))


def other_forward(layer):
    layer.mlp.down_proj.forward = lambda x: nn.functional.linear(x, layer.mlp.down_proj.weight)


def own_forward(layer):
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def hook_within(layer):
    layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output)


def hook_before(layer):
    layer.mlp.register_forward_pre_hook(lambda module, args: None)


def another_activation(layer):
    layer.mlp.act_fn = nn.GELU()


def a_layer_more(layer):
    layer.mlp.adapter = nn.Linear(2, 2)


class OwnLinear(nn.Linear):
    pass


def another_product(layer):
    old = layer.self_attn.v_proj
    layer.self_attn.v_proj = OwnLinear(old.in_features, old.out_features, bias=False)


CHANGES = [other_forward, own_forward, hook_within, hook_before, another_activation, a_layer_more, another_product]


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_the_user_has_changed_runs_as_it_is(change):
    model = tiny_llama(torch.float32)
    dec = Decoder(model, bitwise=False)
    assert passes(dec)
    change(model.model.layers[0])
    dec.target.refresh_weights()
    assert not passes(dec) and not isinstance(dec.target.backend, Reference)


def test_hooks_on_a_layer_still_run():
    model, seen = tiny_llama(torch.float32), []
    dec = Decoder(model, bitwise=False)
    model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    dec.generate([1, 2, 3], 4, "ar", ignore_eos=True)
    assert not passes(dec) and seen[-4:] == [1, 1, 1, 1]


def test_a_pass_in_one_call_gives_the_bits_of_layers_called_one_by_one(monkeypatch):
    prompt = random_tokens(20, 1)
    for name in WHOLE_FAMILIES:
        model_type, overrides = FAMILIES[name]
        dec = Decoder(tiny(model_type, torch.float32, **overrides))
        dec.target.read_features((1, 0, dec.target.layers, 0))
        assert passes(dec) and dec.target.bitwise.rule is not None
        found = [*verified(dec.target, prompt, some_tree()), features(dec.target, prompt)]
        with monkeypatch.context() as patch:
            patch.setattr(type(dec.target.backend.whole), "writes", lambda *given: False)
            others = [*verified(dec.target, prompt, some_tree()), features(dec.target, prompt)]
        assert all(map(torch.equal, found, others)), name


def features(target, prompt):
    read = []
    with torch.inference_mode(), target.patched():
        target.prefill(prompt, FullCache(len(prompt)), read=lambda output: read.append(output.features))
    return torch.cat(read)


def hook_on_the_model(model):
    model.register_forward_hook(lambda module, args, output: output)


def hook_before_the_decoder(model):
    model.model.register_forward_pre_hook(lambda module, args: None)


def hook_on_a_layer(model):
    model.model.layers[1].register_forward_hook(lambda module, args, output: output)


def own_forward_of_the_decoder(model):
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def another_layer(model):
    own_forward(model.model.layers[0])


def fewer_layers(model):
    model.config.num_hidden_layers -= 1


AROUND = [hook_on_the_model, hook_before_the_decoder, hook_on_a_layer, own_forward_of_the_decoder, another_layer]


@pytest.mark.parametrize("change", [*AROUND, fewer_layers])
def test_a_model_that_the_user_has_changed_runs_as_it_is(change):
    model = tiny_llama(torch.float32)
    dec = Decoder(model)
    assert passes(dec)
    change(model)
    dec.target.refresh_weights()
    assert not passes(dec) and "transformers' modules" in dec.report()


def test_hooks_on_norm_embedding_and_head_still_run():
    model, seen = tiny_llama(torch.float32), []
    dec = Decoder(model)
    for part in (model.model.norm, model.model.embed_tokens, model.model.rotary_emb, model.lm_head):
        part.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    dec.generate([1, 2, 3], 4, "ar", ignore_eos=True)
    assert passes(dec) and len(set(seen[-4:])) == 4


def test_under_autocast_the_models_own_forwards_run():
    model, seen = tiny_llama(torch.float32), []
    dec = Decoder(model, bitwise=False)
    own = type(model.model).forward
    dec.generate([1, 2, 3], 2, "ar", ignore_eos=True)  # with the self-tests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model), "forward", lambda *args, **kwargs: seen.append(1) or own(*args, **kwargs))
        dec.generate([1, 2, 3], 2, "ar", ignore_eos=True)
        seen.clear()
        dec.generate([1, 2, 3], 2, "ar", ignore_eos=True)
        assert not seen
        with torch.autocast("cpu", torch.bfloat16):
            dec.generate([1, 2, 3], 2, "ar", ignore_eos=True)
        assert seen
