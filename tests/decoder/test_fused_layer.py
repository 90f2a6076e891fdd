"""Fused decoder layers: the same numbers as transformers' layers, and left off where a layer is another one."""

import pytest
import torch
from torch import nn

from decoder import Decoder
from decoder.backends.fast_paths import FUSED, MODEL
from decoder.backends.native.fused_layer import FusedLayer, fusible
from decoder.cache.full import FullCache
from decoder.sampling.token_tree import TokenTree

from .conftest import VOCAB, tiny_llama
from .test_families import FAMILIES, tiny

FUSED_FAMILIES = [name for name in FAMILIES if FAMILIES[name][0] in ("llama", "mistral", "qwen2", "qwen3")]


def fused(dec):
    return [layer for layer, forward in dec.target.replacements().layers.items() if isinstance(forward, FusedLayer)]


def verified(target, prompt, tree):
    cache = FullCache(len(prompt) + target.slots(len(tree)))
    with torch.inference_mode(), target.patched():
        target.prefill(prompt, cache)
        [seen] = target.forward([tree], [cache], observe=True)
    end = len(prompt) + len(tree)
    return [seen.hidden, seen.logits, *seen.queries.values(), cache.keys[:, :, :, :end], cache.values[:, :, :, :end]]


def some_tree():
    tree = TokenTree(3)
    for parent, token in ((0, 5), (0, 6), (1, 7), (3, 8)):
        tree.add(parent, token, "test")
    return tree


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=["32", "16"])
@pytest.mark.parametrize("name", FUSED_FAMILIES)
def test_a_pass_gives_what_transformers_layers_give(name, dtype, tolerance, monkeypatch):
    model_type, overrides = FAMILIES[name]
    prompt = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    model = tiny(model_type, dtype, **overrides)
    dec = Decoder(model, bitwise=False)
    assert len(fused(dec)) == model.config.num_hidden_layers
    found = verified(dec.target, prompt, some_tree())
    monkeypatch.setattr("decoder.backends.native.fused_layer.fusible", lambda layer: False)
    dec.target.refresh_weights()
    assert not fused(dec)
    for mine, theirs in zip(found, verified(dec.target, prompt, some_tree()), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine - theirs).double().norm() <= tolerance * theirs.double().norm()


def test_layers_of_float64_and_of_other_families_stay_as_they_are():
    assert not fused(Decoder(tiny_llama()))
    assert not fused(Decoder(tiny("olmo2", torch.float32)))


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
def test_a_layer_that_the_user_has_changed_stays_as_it_is(change):
    model = tiny_llama(torch.float32)
    dec = Decoder(model, bitwise=False)
    assert all(fusible(layer) for layer in model.model.layers) and len(fused(dec)) == len(model.model.layers)
    change(model.model.layers[0])
    dec.target.refresh_weights()
    assert fused(dec) == list(model.model.layers[1:])


def test_hooks_on_a_layer_still_run():
    model, seen = tiny_llama(torch.float32), []
    dec = Decoder(model, bitwise=False)
    model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    dec.generate([1, 2, 3], 4, "ar", ignore_eos=True)
    assert len(fused(dec)) == len(model.model.layers) and seen[-4:] == [1, 1, 1, 1]


def test_the_report_tells_of_them():
    report = {path.name: path for path in Decoder(tiny_llama(torch.float32)).target.fast_paths()}
    assert report[FUSED].on and "layers" in report[FUSED].reason


def passes(dec):
    """Whether passes go through the fused model."""
    return dec.target.replacements().model is not None


def test_a_fused_model_gives_the_bits_that_transformers_forwards_give_around_the_same_layers(with_native):
    prompt = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    for name in FUSED_FAMILIES:
        model_type, overrides = FAMILIES[name]
        dec = Decoder(tiny(model_type, torch.float32, **overrides))
        dec.target.read_features((1, 0, dec.target.layers, 0))
        assert passes(dec) and dec.target.bitwise.rule is not None
        found = [*verified(dec.target, prompt, some_tree()), features(dec.target, prompt)]
        dec.target._faster = dec.target.replacements()._replace(model=None)
        others = [*verified(dec.target, prompt, some_tree()), features(dec.target, prompt)]
        assert not passes(dec) and all(map(torch.equal, found, others)), name


def features(target, prompt):
    read = []
    with torch.inference_mode(), target.patched():
        target.prefill(prompt, FullCache(len(prompt)), read=read.append)
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
    assert not passes(dec)
    assert not {path.name: path for path in dec.target.fast_paths()}[MODEL].on


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
        assert not seen
        with torch.autocast("cpu", torch.bfloat16):
            dec.generate([1, 2, 3], 2, "ar", ignore_eos=True)
        assert seen
