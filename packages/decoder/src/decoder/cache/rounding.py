"""transformers' own cache with the rounding of a quantised one: the model that such a cache makes of another."""

from transformers import DynamicCache, PreTrainedConfig

from decoder.cache.form import CacheForm


class _RoundingCache(DynamicCache):
    """Rounds every key and value vector before it is kept and attended to."""

    def __init__(self, form: CacheForm, config: PreTrainedConfig):
        super().__init__(config=config)
        self._form = form

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        rounded = self._form.rounded(key_states), self._form.rounded(value_states)
        return super().update(*rounded, layer_idx, *args, **kwargs)


def rounding_cache(kv_dtype: str | None, config: PreTrainedConfig) -> DynamicCache:
    """A cache for ``past_key_values`` with which the plain model computes what decoding with ``kv_dtype`` computes."""
    return DynamicCache(config=config) if kv_dtype is None else _RoundingCache(CacheForm(kv_dtype), config)
