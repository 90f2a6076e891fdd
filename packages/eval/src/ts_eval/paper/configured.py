"""What the paper's tables tell of models that follows from their configurations alone."""

from pathlib import Path

from ts_eval.comparing.data_dir import DRAFT_MODEL, find_data_dir
from ts_eval.planning.model_shape import read_config, read_shape

A100_BANDWIDTH, A100_OPERATIONS = 2.04e12, 312e12
"""Bytes of memory, and operations in bf16, per second: those of the paper's Table 2."""
CONTEXT = 131_072


def passes(config: str, settings: dict) -> dict[str, float]:
    """What a pass over one token at the end of a text of `CONTEXT` tokens reads and computes on an A100 (Table 2).

    Attention takes two operations per number of a query for its score with each position, and two for the sum.
    """
    shape, text = read_shape(config), read_config(config).get_text_config()
    attention = 4 * shape.layers * text.num_attention_heads * shape.head_dim * CONTEXT
    operations = 2 * shape.read_parameters + attention
    return {
        "weights_gb": shape.pass_bytes / 1e9,
        "load_ms": 1000 * shape.pass_bytes / A100_BANDWIDTH,
        "gigaflop": operations / 1e9,
        "compute_ms": 1000 * operations / A100_OPERATIONS,
    }


def draft_models(config: str | None, settings: dict) -> dict[str, float | None] | None:
    """The shape of a draft model (Table 11); without a name, of the one that TriForce* takes here, if there is one.

    What a family's configuration does not have is None.
    """
    if config is None:
        config = settings.get("draft_model") or _shipped(settings)
    if config is None:
        return None
    text = read_config(config).get_text_config()
    return {
        "hidden": text.hidden_size,
        "intermediate": getattr(text, "intermediate_size", None),
        "layers": text.num_hidden_layers,
        "heads": text.num_attention_heads,
        "kv_heads": getattr(text, "num_key_value_heads", None),
        "positions": text.max_position_embeddings,
        "rope_theta": (getattr(text, "rope_parameters", None) or {}).get("rope_theta"),
        "vocabulary": text.vocab_size,
        "parameters_m": read_shape(config).parameters / 2**20,
    }


def _shipped(settings: dict) -> str | None:
    if settings.get("model") is not None:
        return None
    folder = Path(find_data_dir(settings.get("data_dir"))) / DRAFT_MODEL
    return str(folder) if folder.is_dir() else None
