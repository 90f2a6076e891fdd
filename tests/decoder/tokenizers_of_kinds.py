"""Small tokenizers of the kinds in use: how each marks spaces, and what it does with characters it has no token for."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .. import tiny
from ..tiny import LETTERS

SPECIAL = ["<unk>", "<s>", "</s>", "<|sys|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["boat", "s", "sail", ".", "a", "é", "n", "'t", "\n", ",", "do"]
MARKED = [f"\u2581{word}" for word in WORDS if word.isalpha()] + ["\u2581", "\u2581\u2581"]


def _finished(tokenizer, **settings):
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|sys|>"],
        **settings,
    )


def _vocabulary(*parts):
    return {piece: number for number, piece in enumerate([*SPECIAL, *(piece for part in parts for piece in part)])}


def llama():
    """Llama 2 and Mistral: a space in front of the text, bytes for other characters."""
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocabulary(BYTES, MARKED, WORDS), merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return _finished(tokenizer)


def gemma():
    """Gemma: as Llama 2, but no space in front of the text."""
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocabulary(BYTES, MARKED, WORDS), merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(tokenizer)


def metaspace():
    """T5 and XLM-R: spaces as in Llama 2, by another decoder."""
    tokenizer = Tokenizer(models.WordLevel(_vocabulary(MARKED, WORDS), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _finished(tokenizer)


def word_piece():
    """BERT: pieces that continue a word are marked, and there is a space before all others but the first."""
    pieces = [f"##{word}" for word in WORDS if word.isalpha()]
    tokenizer = Tokenizer(models.WordPiece(_vocabulary(WORDS, pieces), unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _finished(tokenizer, clean_up_tokenization_spaces=True)


def word_ends():
    """GPT-1 and XLM: the ends of words are marked, and a space comes with what follows."""
    pieces = [f"{word}</w>" for word in WORDS]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(WORDS, pieces), merges=[], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return _finished(tokenizer)


def byte_level():
    """GPT-2, Llama 3 and Qwen: spaces are letters like others, and a token may end within a character."""
    # "a" and the first byte of an accented letter; the last byte of one and a space; the middle of an emoji.
    pieces = ["\u0120boat", "aÃ", "©Ġ", "Ł", "ðŁ", "ĺĢ", "âĢ", "boat"]
    pieces = [piece for piece in pieces if piece not in LETTERS]
    return _finished(tiny.byte_level(_vocabulary(LETTERS, pieces)))


KINDS = {one.__name__: one for one in (llama, gemma, metaspace, word_piece, word_ends, byte_level)}
