"""The cache reaches a model by the name that its version of transformers gives it."""

import torch
from torch import nn

from decoder.cache.argument import cache_named


class Newer(nn.Module):
    def forward(self, input_ids, cache=None, use_cache=True):
        return input_ids


class Older(nn.Module):
    def forward(self, input_ids, past_key_values=None, use_cache=True):
        return input_ids


class Wrapper(nn.Module):
    def forward(self, *args, **kwargs):
        return args


def test_each_model_gets_its_own_name():
    assert cache_named(Newer(), 1) == {"cache": 1}
    assert cache_named(Older(), 1) == {"past_key_values": 1}


def test_a_wrapper_hands_on_what_transformers_own_models_take(recwarn, model):
    (name,) = cache_named(Wrapper(), None)
    (own,) = cache_named(model, None)
    assert name == own
    model(torch.tensor([[1, 2]]), **{name: None}, use_cache=True)
    assert not [one for one in recwarn if name in str(one.message)]
