"""The table of rotary angles: the module's own numbers at every position, whatever was asked for before."""

import pytest
import torch

from decoder.backends.native.angles import AngleTable

from .test_families import tiny

KINDS = {
    "one kind": ("llama", {}, ()),
    "by kind of layer": (
        "gemma3_text",
        dict(layer_types=["sliding_attention", "full_attention"]),
        ("sliding_attention", "full_attention"),
    ),
    "half as wide": ("gpt_oss", {}, ()),
}


def made(name, dtype):
    model_type, overrides, types = KINDS[name]
    rotary = tiny(model_type, dtype, **overrides).model.rotary_emb
    turned = 2 * max(len(one) for one in rotary.buffers())
    return rotary, AngleTable(rotary, types, max(1, len(types)), turned, dtype)


def of_module(rotary, name, positions, dtype, turned):
    states = torch.empty(1, 1, 1, dtype=dtype)
    types = KINDS[name][2] or (None,)
    for one in types:
        both = rotary(states, positions[None], *(() if one is None else (one,)))
        yield [torch.cat([each] * (turned // each.shape[-1]), -1)[0].float() for each in both]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_every_position_has_the_modules_own_angles(name, dtype):
    """Also those that make the table grow, one by one and by far, and trees' positions, which repeat."""
    rotary, table = made(name, dtype)
    for positions in ([0], [3, 4, 4, 5], [511, 512], [513], [5000, 2], [7, 20_000]):
        asked = torch.tensor(positions)
        found = table.at(asked)
        wanted = list(of_module(rotary, name, asked, dtype, found[0].cosines.shape[-1]))
        assert len(found) == len(wanted)
        for own, theirs in zip(found, wanted, strict=True):
            assert all(torch.equal(*pair) for pair in zip(own, theirs, strict=True))


def test_what_the_user_changes_takes_effect_at_once():
    rotary, table = made("one kind", torch.float32)
    asked = torch.tensor([5, 600])

    def is_the_modules():
        wanted = next(of_module(rotary, "one kind", asked, torch.float32, table.at(asked)[0].cosines.shape[-1]))
        return all(torch.equal(*pair) for pair in zip(table.at(asked)[0], wanted, strict=True))

    before = table.at(asked)[0].cosines
    rotary.inv_freq.mul_(0.5)
    assert is_the_modules() and not torch.equal(table.at(asked)[0].cosines, before)
    rotary.attention_scaling = 1.5
    assert is_the_modules()
    rotary.forward = lambda x, position_ids: (torch.ones(1, len(asked), 8), torch.zeros(1, len(asked), 8))
    assert bool((table.at(asked)[0].cosines == 1).all())
