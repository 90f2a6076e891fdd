"""Models that wrap a language model with other parts, such as vision: the language model is read by itself."""

import logging
import os
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

logger = logging.getLogger(__name__)

NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""What a language model's tensors are called inside another model (a pattern), and what by itself."""

_told: set[str] = set()


def language_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the language model inside ``config``; ``config`` itself where none can be run by itself."""
    if config.is_encoder_decoder or getattr(config, "auto_map", None):
        return config
    text = config.get_text_config(decoder=True)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    if MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].config_class is not type(text):
        return config
    # What the whole model has decided for its parts.
    for name in ("tie_word_embeddings", "quantization_config"):
        if (decided := getattr(config, name, None)) is not None:
            setattr(text, name, decided)
    for name in ("dtype", "_commit_hash"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    text.name_or_path = config.name_or_path
    return text


def reading_alone(config: PreTrainedConfig, source: str | os.PathLike) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that read the language model of ``config`` alone; empty if it is no part.

    That only the language model is read is told once for each ``source``.
    """
    text = language_config(config)
    if text is config:
        return {}
    if str(source) not in _told:
        _told.add(str(source))
        logger.warning("%s is read without its other parts: text only, by its %s alone", source, text.model_type)
    return {"config": text, "key_mapping": NAMES}
