"""transformers' own cache with the rounding of a quantised one: the model that such a cache makes of another."""

import sys

from transformers import DynamicCache, PreTrainedModel

from decoder.cache.form import CacheForm


class _Rounding:
    """Rounds every key and value vector before it is kept and attended to; for a cache beside which it stands."""

    form: CacheForm

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        rounded = self.form.rounded(key_states), self.form.rounded(value_states)
        return super().update(*rounded, layer_idx, *args, **kwargs)  # type: ignore[misc]


def rounding_cache(kv_dtype: str | None, model: PreTrainedModel) -> DynamicCache:
    """A cache for `cache_named` with which the plain model computes what decoding with ``kv_dtype`` computes."""
    kind, settings = _cache_class(model), {}
    if kind is DynamicCache:
        settings = {"config": model.config}
    if kv_dtype is None:
        return kind(**settings)
    cache = type("RoundingCache", (_Rounding, kind), {"form": CacheForm(kv_dtype)})(**settings)
    assert isinstance(cache, DynamicCache)
    return cache


def _cache_class(model: PreTrainedModel) -> type[DynamicCache]:
    """The class of the cache that a model takes: MiniMax has one of its own, beside its modules."""
    name = type(model).__module__
    beside = [one for one in vars(sys.modules[name]).values() if isinstance(one, type) and one.__module__ == name]
    return next((one for one in beside if issubclass(one, DynamicCache)), DynamicCache)
