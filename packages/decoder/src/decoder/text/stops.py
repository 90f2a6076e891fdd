"""What ends a text before its length: tokens and strings."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoder.checks import check, shown

Stop = str | int | Sequence[str | int] | None


def check_stop(stop: Stop, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> tuple[set[int], list[str]]:
    """The token ids and the strings of a ``stop`` argument.

    Raises:
        ValueError: ``stop`` has another form, an id outside the vocabulary, a string that is not valid Unicode, or
            strings when there is no tokenizer.
    """
    given = [] if stop is None else [stop] if isinstance(stop, str | int) else stop
    if (
        not isinstance(given, Sequence)
        or isinstance(given, bytes | bytearray)
        or any(not isinstance(s, str | int) or isinstance(s, bool) or s == "" for s in given)
    ):
        raise ValueError(f"stop takes non-empty strings and token ids, not {shown(stop)}")
    outside = next((s for s in given if isinstance(s, int) and not 0 <= s < vocab_size), None)
    if outside is not None:
        raise ValueError(f"stop token id {shown(outside)} is outside the vocabulary of {vocab_size}")
    strings = [s for s in given if isinstance(s, str)]
    if strings and tokenizer is None:
        raise ValueError("stop strings need a tokenizer: give the Decoder one, or stop at token ids")
    for string in strings:
        check(string, f"the stop string {shown(string)}")
    return {s for s in given if isinstance(s, int)}, strings


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """The end-of-sequence ids of the generation configuration; if it has none, the tokenizer's."""
    config = getattr(model, "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
