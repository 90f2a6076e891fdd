"""`ts-eval metrics`: the measures of any text files."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from transformers import AutoTokenizer

import decoder
from decoder.parts import read_tokenizer
from ts_eval import defaults, metrics
from ts_eval.commands.terminal import Columns
from ts_eval.comparing.checkpoints import named, refuse_missing
from ts_eval.comparing.prompts import read_text, read_texts
from ts_eval.report.table import DISTINCT, DISTINCT_HEADER, number


def measure(
    files: Sequence[str],
    tokenizer: str | None = None,
    model: str | None = None,
    embedding_model: str | None = None,
    reference: str | None = None,
    piece_tokens: int = defaults.PIECE_TOKENS,
    perplexity: bool = True,
) -> dict[str, dict]:
    """Per file, `metrics.measure_text` over the words, or over the tokens of ``tokenizer`` or ``model``.

    A model adds the ``perplexity``, unless that is not wanted, an embedding model the ``semantic_diversity``. A
    ``reference``, human texts in a file or dataset as `prompts.read_texts` takes them, adds ``mauve`` in the model's
    features, with ``mauve_pieces``, how many pieces of ``piece_tokens`` tokens each side has, and ``mauve_reason``
    where the text is too short.

    Raises:
        OSError: a file or model that cannot be read.
        ValueError: a file that is no UTF-8 text; or a reference without a model or the extra `mauve`, or that is too
            short.
    """
    texts = {file: _read(file) for file in files}
    refuse_missing("model", model)
    refuse_missing("embedding model", embedding_model)
    human = None if reference is None else _human_texts(reference, model)
    dec = loaded = embed = nearness = None
    if model:
        with named(model):
            if perplexity or human is not None:
                dec = decoder.load(model)
            loaded = read_tokenizer(model)
    if tokenizer:
        with named(tokenizer):
            loaded = AutoTokenizer.from_pretrained(tokenizer)
    if embedding_model:
        with named(embedding_model):
            embed = metrics.SentenceEmbedder(embedding_model)
    if human is not None:
        nearness = _Nearness(reference, human, dec, piece_tokens)
    rows = {}
    for file, text in texts.items():
        ids = _ids(loaded, text) if loaded else None
        row: dict[str, Any] = {"words": len(text.split())} if ids is None else {"tokens": len(ids)}
        row |= metrics.measure_text(text, ids)
        own = None if dec is None else ids if tokenizer is None else _ids(dec.tokenizer, text)
        if dec is not None and perplexity:
            row["perplexity"] = metrics.perplexity(dec.model, own)
        if embed is not None:
            row["semantic_diversity"] = metrics.semantic_diversity(text, embed)
        if nearness is not None:
            row |= nearness.of(file, own)
        rows[file] = row
    return rows


def _ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _human_texts(reference: str, model: str | None) -> list[str]:
    """The texts of a reference, refused before anything is loaded where MAUVE cannot be computed."""
    if not model:
        raise ValueError("--reference compares in a model's features: give --model")
    metrics.mauve_package()
    texts = []
    for name, text in read_texts(reference):
        if not isinstance(text, str):
            raise ValueError(f"{name} of the reference {reference} is a chat: give human texts")
        texts.append(text)
    return texts


class _Nearness:
    """MAUVE of texts against the human ``texts`` of a file."""

    def __init__(self, name: str, texts: Sequence[str], dec: "decoder.Decoder", piece_tokens: int):
        self.features = metrics.PieceFeatures(dec.model, piece_tokens)
        tokens = [_ids(dec.tokenizer, text) for text in texts]
        reason = self._reason(f"the reference {name}", sum(len(metrics.pieces_of(ids, piece_tokens)) for ids in tokens))
        if reason:
            raise ValueError(reason)
        self.human = torch.cat([self.features(ids) for ids in tokens])

    def _reason(self, name: str, pieces: int) -> str | None:
        if pieces >= metrics.FEWEST_PIECES:
            return None
        return (
            f"MAUVE takes at least {metrics.FEWEST_PIECES:,} pieces of each side, and {name} has {pieces:,} of "
            f"{self.features.piece_tokens:,} tokens"
        )

    def of(self, name: str, token_ids: Sequence[int]) -> dict[str, Any]:
        pieces = len(metrics.pieces_of(token_ids, self.features.piece_tokens))
        row: dict[str, Any] = {"mauve": None, "mauve_pieces": {"generated": pieces, "human": len(self.human)}}
        row["mauve_reason"] = self._reason(name, pieces)
        if row["mauve_reason"] is None:
            with _quiet_clustering():
                row["mauve"] = metrics.mauve(self.human, self.features(token_ids))
        return row


@contextmanager
def _quiet_clustering() -> Iterator[None]:
    """Without the warning that faiss writes, past Python, of each clustering: it wants more pieces than MAUVE's ten."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _read(file: str) -> str:
    return read_text(Path(file))


def table(rows: dict[str, dict]) -> list[RenderableType]:
    """The measures of `measure`, a row per file, and below it why a text has no MAUVE."""
    first = next(iter(rows.values()))
    unit = "tokens" if "tokens" in first else "words"
    header = ["file", unit, *DISTINCT_HEADER, *(f"Self-BLEU-{n}" for n in metrics.BLEU_ORDERS)]
    header += ["longest repeat", "repeated", "loop at", "compression"]
    optional = {"perplexity": "perplexity", "semantic_diversity": "semantic", "mauve": "MAUVE"}
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
    reasons = [f"{row['mauve_reason']}." for row in rows.values() if row.get("mauve_reason")]
    return [Group(Columns(header, lines), *reasons)]
