"""The generated texts, with accepted runs and repeated spans marked."""

from itertools import pairwise

from ts_eval import metrics

Span = tuple[str, str]
"""A piece of text and what it is: "a" accepted from a draft, "r" repeated, "ar" both, "" neither."""


def coloured_texts(results: dict) -> list[dict]:
    """Of each prompt's first run: name, beginning and the spans of every method's text.

    ``same_as_ar`` says of a text that it is ar's, token for token.
    """
    methods = results["methods"]
    texts = []
    for place, first in enumerate(methods["ar"]["runs"]):
        if first["run"]:
            continue
        rows = [
            {"method": name, "same_as_ar": row["runs"][place]["identical_to_ar"], "spans": spans_of(row["runs"][place])}
            for name, row in methods.items()
            if row["runs"][place]["token_ids"]  # a server's texts are not kept
        ]
        texts.append({"prompt": first["prompt"], "seed": first["seed"], "rows": rows})
    return texts


def spans_of(record: dict) -> list[Span]:
    """The text of a generation in spans; a character belongs to the token that completed it."""
    repeated = metrics.repeated(record["token_ids"])
    marks = ["a" * accepted + "r" * again for accepted, again in zip(accepted_tokens(record), repeated, strict=True)]
    spans: list[list[str]] = []
    for (start, end), mark in zip(pairwise([0, *record["token_ends"]]), marks, strict=True):
        # A model may well generate control characters, which a page cannot show.
        piece = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in record["text"][start:end])
        if spans and spans[-1][1] == mark:
            spans[-1][0] += piece
        elif piece:
            spans.append([piece, mark])
    return [(piece, mark) for piece, mark in spans]


def accepted_tokens(record: dict) -> list[bool]:
    """Per token, whether it was drafted; the others were drawn by the model at the end of a step."""
    accepted = [0, *record["step_accepted"]]
    flags: list[bool] = []
    for tokens, (before, now) in zip(record["step_tokens"], pairwise(accepted), strict=True):
        # transformers does not tell; its steps, too, end in one token of the model.
        drafted = tokens - 1 if now is None else now - before
        flags += [True] * drafted + [False] * (tokens - drafted)
    return flags
