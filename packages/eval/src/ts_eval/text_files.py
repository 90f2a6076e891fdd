"""`ts-eval metrics`: the measures of any text files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import decoder
from ts_eval import metrics
from ts_eval.checkpoints import named, refuse_missing
from ts_eval.table import DISTINCT, DISTINCT_HEADER, format_table, number


def measure(
    files: Sequence[str], tokenizer: str | None = None, model: str | None = None, embedding_model: str | None = None
) -> dict[str, dict]:
    """Per file, `metrics.measure_text` over the words, or over the tokens of ``tokenizer`` or ``model``.

    A model adds the ``perplexity``, an embedding model the ``semantic_diversity``.

    Raises:
        OSError: a file or model that cannot be read.
        ValueError: a file that is no UTF-8 text.
    """
    texts = {file: _read(file) for file in files}
    refuse_missing("model", model)
    refuse_missing("embedding model", embedding_model)
    dec = loaded = embed = None
    if model:
        with named(model):
            dec = decoder.load(model)
        loaded = dec.tokenizer
    if tokenizer:
        with named(tokenizer):
            loaded = AutoTokenizer.from_pretrained(tokenizer)
    if embedding_model:
        with named(embedding_model):
            embed = metrics.SentenceEmbedder(embedding_model)
    rows = {}
    for file, text in texts.items():
        ids = loaded(text, add_special_tokens=False, verbose=False)["input_ids"] if loaded else None
        row: dict[str, Any] = {"words": len(text.split())} if ids is None else {"tokens": len(ids)}
        row |= metrics.measure_text(text, ids)
        if dec is not None:
            own = (
                ids if tokenizer is None else dec.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            )
            row["perplexity"] = metrics.perplexity(dec.model, own)
        if embed is not None:
            row["semantic_diversity"] = metrics.semantic_diversity(text, embed)
        rows[file] = row
    return rows


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text") from error


def table(rows: dict[str, dict], width: int) -> str:
    """The measures of `measure`, a row per file."""
    first = next(iter(rows.values()))
    unit = "tokens" if "tokens" in first else "words"
    header = ["file", unit, *DISTINCT_HEADER, *(f"Self-BLEU-{n}" for n in metrics.BLEU_ORDERS)]
    header += ["longest repeat", "repeated", "loop at", "compression"]
    optional = {"perplexity": "perplexity", "semantic_diversity": "semantic"}
    header += [title for name, title in optional.items() if name in first]
    lines = []
    for file, row in rows.items():
        cells = [file, number(row[unit], 0)]
        cells += [number(row["distinct"][n], 3) for n in DISTINCT]
        cells += [number(row["self_bleu"][str(n)], 3) for n in metrics.BLEU_ORDERS]
        cells += [number(row["longest_repeated_span"], 0), number(row["repeated_share"], 3)]
        cells += [number(row["loop_start"], 0), number(row["compression_ratio"])]
        cells += [number(row[name], 3) for name in optional if name in row]
        lines.append(cells)
    return format_table(header, lines, width)
