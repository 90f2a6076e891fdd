"""Draft models with the vocabulary of the model: the same tokens by the same ids, padding aside."""

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

_MOST_PADDING = 1024  # rows of a language-model head beyond the tokenizer's tokens


def refuse_other_size(size: int, draft_size: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise ValueError where two language-model heads of so many rows cannot be of one vocabulary.

    Heads of one vocabulary may be padded to different sizes, as those of Qwen2.5 are; what is padding the tokenizer
    tells.
    """
    if size == draft_size:
        return
    smaller, larger = sorted((size, draft_size))
    if tokenizer is not None and larger - _MOST_PADDING <= len(tokenizer) <= smaller:
        return
    raise ValueError(
        f"the draft model has another vocabulary: {draft_size} tokens, the model's {size}; give one of the same tokens"
    )


def refuse_other_tokens(tokenizer: PreTrainedTokenizerBase, of_draft: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where two tokenizers have different tokens by one id; ids that only one of them has are padding.

    So are tokens that some files name where a vocabulary has none.
    """
    tokens, drafts = ({place: token for token, place in each.get_vocab().items()} for each in (tokenizer, of_draft))
    for place in sorted(tokens.keys() & drafts.keys()):
        own, other = tokens[place], drafts[place]
        if own != other and not any(token.startswith("[PAD") for token in (own, other)):
            raise ValueError(
                f"the draft model has another vocabulary: token {place} is {other!r}, the model's {own!r}; give one "
                "of the same tokens"
            )


def known(tokens: Iterable[int], size: int) -> list[int]:
    """The tokens, with another one in place of each that is padding which a model of ``size`` rows has no row for."""
    return [min(token, size - 1) for token in tokens]
