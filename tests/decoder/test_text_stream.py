"""Long streams: the same text as decoding it whole, for work that grows with its length and no faster."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from decoder import Decoder, SamplingParams
from decoder.text.stream import TextStream

from ..tiny import byte_tokenizer
from .conftest import tiny_llama


@pytest.mark.parametrize("text", ["d\u00e9j\u00e0 vu \u2014 na\u00efve \U0001f40b! " * 12, "plain text, " * 30])
@pytest.mark.parametrize("garbage", [0, 1, 40, 200])
@pytest.mark.parametrize("every", [1, 7])
def test_a_stream_is_the_text_whatever_garbage_stands_in_it(text, garbage, every):
    """Lone continuation bytes are no character's beginning: one replacement character each, and not held back."""
    tokenizer = byte_tokenizer()
    lone = tokenizer("\u0080")["input_ids"][1]
    ids = [*tokenizer(text)["input_ids"], *[lone] * garbage, *tokenizer(text)["input_ids"]]
    stream, shown, decoded, longest_wait = TextStream(tokenizer, stop=["never there"]), "", 0, 0
    decode = stream._decode

    def counted(tokens):
        nonlocal decoded
        decoded += len(tokens)
        return decode(tokens)

    stream._decode = counted
    for count, token in enumerate(ids, start=1):
        stream.push(token)
        if count % every == 0:
            shown += stream.take()
            if count % 5 == 0:
                longest_wait = max(longest_wait, len(tokenizer.decode(ids[:count])) - len(shown))
    shown += stream.take(final=True)
    assert shown == stream.text == tokenizer.decode(ids)
    assert longest_wait < 40
    assert decoded < 60 * len(ids)


def test_words_on_either_side_of_a_special_token_keep_their_space():
    """Tokenizers like SentencePiece write a space before each word but the text's first."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "\u2581ab": 1, "\u2581c": 2, "d": 3, "<|sys|>": 4}, unk_token="<s>"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|sys|>"]})
    for ids in ([1, 0, 1], [0, 1, 4, 4, 2, 3], [1, 0, 0, 3, 2], [4, 0]):
        stream, shown = TextStream(tokenizer), ""
        for token in ids:
            stream.push(token)
            shown += stream.take()
        shown += stream.take(final=True)
        assert shown == tokenizer.decode(ids, skip_special_tokens=True)
    assert "ab c" in tokenizer.decode([1, 4, 2], skip_special_tokens=True)


@pytest.mark.parametrize("method", ["ar", "prompt-lookup", "suffix"])
def test_stop_strings_count_behind_min_tokens(method):
    """One that the first tokens complete is text; one that ends behind them is a stop, wherever it begins."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("ababxabab")["input_ids"]

    def spell(context, logits):
        return torch.full_like(logits, -1.0).index_fill(0, torch.tensor([ids[(len(context) - 2) % len(ids)]]), 1.0)

    dec = Decoder(tiny_llama(vocab_size=256), tokenizer)
    for least, stop, text in ((0, "ab", ""), (2, "ab", "ab"), (3, "ab", "ab"), (4, "ab", "ababx"), (4, "abx", "ab")):
        sampling = SamplingParams(temperature=0, min_tokens=least)
        chunks = list(dec.stream([1, 2], len(ids), method, sampling, stop=[stop], logits_hook=spell))
        out = chunks[-1].output
        assert (out.text, out.finish_reason) == (text, "stop") and "".join(one.text for one in chunks) == text
        assert len(out.token_ids) == len(text) + len(stop) > least


def test_a_stop_string_that_the_last_flush_completes_is_a_stop():
    """Bytes that waited for the rest of a character count as text once the text has ended."""
    tokenizer = byte_tokenizer()
    first, second = tokenizer("a\u00e9")["input_ids"][:2]

    def spell(context, logits):
        return torch.full_like(logits, -1.0).index_fill(0, torch.tensor([first if len(context) == 2 else second]), 1.0)

    dec = Decoder(tiny_llama(vocab_size=256), tokenizer)
    out = dec.generate([1, 2], 2, "ar", SamplingParams(temperature=0), stop=["\ufffd"], logits_hook=spell)
    assert out.token_ids == [first, second]
    assert (out.finish_reason, out.text) == ("stop", "a")
