"""Long streams: the same text as decoding it whole, for work that grows with its length and no faster."""

import pytest

from decoder.text.stream import TextStream

from .test_using_it import byte_tokenizer


@pytest.mark.parametrize("text", ["d\u00e9j\u00e0 vu \u2014 na\u00efve \U0001f40b! " * 40, "plain text, " * 100])
@pytest.mark.parametrize("garbage", [0, 1, 40, 500])
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
            longest_wait = max(longest_wait, len(tokenizer.decode(ids[:count])) - len(shown))
    shown += stream.take(final=True)
    assert shown == stream.text == tokenizer.decode(ids)
    assert longest_wait < 40
    assert decoded < 60 * len(ids)
