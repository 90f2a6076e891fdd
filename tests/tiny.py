"""What tiny models of all packages' tests have alike: their sizes, and tokenizers whose tokens are bytes."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The tokens of single bytes."""


def byte_level(tokens: Iterable[str] = LETTERS, merges: Iterable[tuple[str, str]] = ()) -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen, of ``tokens`` in the order of their ids."""
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def joined(merges: Iterable[tuple[str, str]]) -> list[str]:
    """The tokens that merges make."""
    return ["".join(pair) for pair in merges]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that every accented letter is split over two tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), clean_up_tokenization_spaces=False)
