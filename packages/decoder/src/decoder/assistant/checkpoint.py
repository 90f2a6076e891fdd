"""Assistants as they are published beside Gemma 4: folders in transformers' layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from decoder.assistant.model import AssistantModel
from decoder.draft_heads import refuse_not_finite
from decoder.eagle3.checkpoint import read_weights
from decoder.heads_files import CONFIG, refuse_misfits
from decoder.model.options import ASSISTANTS

_ORDERING = "masked_embedding.token_ordering"


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of an assistant."""
    return config.get("model_type") in ASSISTANTS


def read_assistant(folder: Path, config: Mapping[str, Any], source: str) -> AssistantModel:
    """The assistant in ``folder``, in the dtype it was saved in; ``source`` is what errors call it.

    Args:
        config: the content of its ``config.json``.

    Raises:
        OSError: a file is missing.
        ValueError: it is none, or tensors are missing, of other shapes, or no finite numbers.
    """
    try:
        parsed = AutoConfig.for_model(**config)
        clusters = (parsed.num_centroids, parsed.centroid_intermediate_top_k) if parsed.use_ordered_embeddings else None
        with torch.device("meta"):
            model = AssistantModel(parsed.get_text_config(), parsed.backbone_hidden_size, clusters)
    except Exception as error:
        # Which types transformers raises for a field that it does not take differs from field to field.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        told = f"no or an unknown {error}" if isinstance(error, KeyError) else lines[-1]
        raise ValueError(f"{folder / CONFIG} is not of an assistant that can be read: {told}") from error
    tensors = read_weights(folder)
    embeddings = tensors.pop("embed_tokens.weight", None)
    if embeddings is not None:
        tensors.setdefault("lm_head.weight", embeddings)
    refuse_misfits(tensors, model.state_dict(), f"the assistant in {folder}")
    load(model, tensors, folder)
    model.source = source
    return model


def load(model: AssistantModel, tensors: Mapping[str, torch.Tensor], place: Path) -> None:
    """Give a model the tensors that were found at ``place``, whose names and shapes are right.

    Raises ValueError if they are no finite numbers.
    """
    own = dict(tensors)
    if _ORDERING in own:
        ordering = own.pop(_ORDERING).long()
        if not torch.equal(ordering.sort().values, torch.arange(len(ordering))):
            raise ValueError(f"{_ORDERING} of the assistant in {place} does not name each token once")
    for name, tensor in own.items():
        refuse_not_finite(name, tensor, f" in {place}")
    model.load_state_dict(own | ({_ORDERING: ordering} if _ORDERING in tensors else {}), assign=True, strict=False)
    model.requires_grad_(False)
