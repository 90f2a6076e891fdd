"""The text of new tokens is what prompt and tokens together decode to beyond what the prompt does, in all its uses."""

import json
from os.path import commonprefix

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TextIteratorStreamer, TextStreamer

import decoder
from decoder import Decoder, SamplingParams
from decoder.cli.continuation import stream_on
from decoder.text.stream import TextStream, end_of_text
from decoder.text.tokens import TextOffsets, TokenTexts

from .conftest import tiny_llama
from .serving import served
from .tokenizers_of_kinds import BYTES, KINDS, SPECIAL, llama

TOKENIZERS = {name: kind() for name, kind in KINDS.items()}
REPLACEMENT = "\ufffd"


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def added(tokenizer, prompt, ids):
    """The reference: transformers' text of all tokens, without what it has in common with the prompt's."""
    whole, before = decoded(tokenizer, [*prompt, *ids]), decoded(tokenizer, prompt)
    return whole[len(commonprefix([whole, before])) :]  # noqa: RUF071 (characters are meant)


def streamed(tokenizer, prompt, ids, every=1):
    stream, pieces = TextStream(tokenizer, ["never there"], prompt), []
    for count, token in enumerate(ids, 1):
        stream.push(token)
        if count % every == 0:
            pieces.append(stream.take())
    pieces.append(stream.take(final=True))
    assert "".join(pieces) == stream.text
    return stream.text


def tokens(tokenizer, without=()):
    numbers = [number for piece, number in tokenizer.get_vocab().items() if piece not in without]
    return st.lists(st.sampled_from(sorted(numbers)), max_size=14)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_text_of_any_tokens_is_what_they_add_to_the_prompts(kind, data):
    """Bytes in any order among them, which are shown as in the whole text."""
    tokenizer = TOKENIZERS[kind]
    prompt, ids = data.draw(tokens(tokenizer, BYTES)), data.draw(tokens(tokenizer))
    assert streamed(tokenizer, prompt, ids, data.draw(st.integers(1, 3))) == added(tokenizer, prompt, ids)


@pytest.mark.parametrize("kind", ["llama", "gemma", "byte_level"])
@settings(max_examples=200, deadline=None)
@given(text=st.text("a \u00e9\u20ac\U0001f40b\n", max_size=12), data=st.data())
def test_a_character_that_the_prompt_begins_belongs_to_the_text(kind, text, data):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer("a" + text + "s")["input_ids"]
    cut = data.draw(st.integers(0, len(ids)))
    whole = decoded(tokenizer, ids)
    assert streamed(tokenizer, ids[:cut], ids[cut:]) == whole[whole_characters(tokenizer, ids[:cut]) :]


def whole_characters(tokenizer, ids):
    """How many characters of a text its first tokens hold; of these, transformers may show all bytes as invalid."""
    pieces = tokenizer.convert_ids_to_tokens(ids)
    if not set(pieces).intersection(BYTES):
        shown = decoded(tokenizer, ids)
        return len(shown) - shown.endswith(REPLACEMENT)
    data = b"".join(
        bytes([BYTES.index(one)]) if one in BYTES else one.replace("\u2581", " ").encode() for one in pieces
    )
    return len(data.decode(errors="ignore")) - (tokenizer is TOKENIZERS["llama"])


def test_a_run_of_byte_tokens_that_ends_within_a_character_is_shown_as_in_the_whole_text():
    """All of its bytes as invalid; but of a long run a stream has given whole characters, and cannot take them back."""
    tokenizer = TOKENIZERS["llama"]
    ids = tokenizer("a \u20ac\U0001f40b\u20ac")["input_ids"]
    assert streamed(tokenizer, ids[:1], ids[1:-1]) == added(tokenizer, ids[:1], ids[1:-1])
    assert streamed(tokenizer, ids[:1], ids[1:-1]).endswith(9 * REPLACEMENT)
    long = tokenizer("\u20ac" * 40)["input_ids"]
    assert streamed(tokenizer, [], long[:-1]).startswith("\u20ac" * 20)


def test_a_stop_string_of_bytes_ends_the_text_at_once():
    tokenizer = TOKENIZERS["llama"]
    stream = TextStream(tokenizer, ["\u20ac"], tokenizer("a")["input_ids"])
    for token in tokenizer("\u20ac")["input_ids"][-3:]:
        assert not stream.stopped
        stream.push(token)
    assert stream.stopped and "\u20ac" not in stream.take(final=True)


def test_only_the_end_of_a_long_prompt_is_decoded():
    tokenizer = llama()
    prompt = tokenizer("a sail. " * 20_000)["input_ids"]
    most = 0

    def counted(ids):
        nonlocal most
        most = max(most, len(ids))
        return decoded(tokenizer, ids)

    assert end_of_text(prompt, counted) and most < 20


def speaking(kind="llama"):
    tokenizer = KINDS[kind]()
    model = tiny_llama(vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2)
    return Decoder(model, tokenizer)


def spelling(wanted, prompt_tokens):
    """A hook by which the model says ``wanted``."""

    def hook(context, logits):
        return torch.full_like(logits, -1e9).index_fill(0, torch.tensor(wanted[len(context) - prompt_tokens]), 0.0)

    return hook


def ids_of(tokenizer, *pieces):
    return tokenizer.convert_tokens_to_ids(list(pieces))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_streams_batches_and_continued_runs_have_the_same_text(kind):
    """Of a model that says what it likes, behind prompts that end in words, in spaces, and in special tokens."""
    dec = speaking(kind)
    # A run of bytes is shown as invalid as a whole once one is, which a stream could not take back.
    without = [number for piece, number in dec.tokenizer.get_vocab().items() if piece in BYTES]
    some = [token for token in range(4, len(dec.tokenizer)) if REPLACEMENT not in decoded(dec.tokenizer, [4, token])]
    for seed, end in enumerate((some[:1], some[-2:], [1], [some[0], 3], some[5:14])):
        prompt, sampling = [1, *end], SamplingParams(seed=seed, suppress_tokens=without)
        arguments = dict(max_new_tokens=16, sampling=sampling, ignore_eos=True)
        out = dec.generate(prompt, method="ar", **arguments)
        assert out.text == added(dec.tokenizer, prompt, out.token_ids)
        assert dec.generate(prompt, **arguments).text == out.text
        assert "".join(chunk.text for chunk in dec.stream(prompt, **arguments)) == out.text
        pair = dec.generate_batch([prompt, [1, 4]], **arguments)
        assert pair[0].text == out.text
        for cut in (0, 1, 7):
            chunks = list(stream_on(dec, prompt, out.token_ids[:cut], **arguments))
            assert "".join(chunk.text for chunk in chunks) == chunks[-1].output.text == out.text


def test_a_stop_string_may_begin_with_the_first_tokens_space():
    dec = speaking()
    prompt = ids_of(dec.tokenizer, "<s>", "\u2581a")
    wanted = ids_of(dec.tokenizer, "\u2581boat", "s", "\u2581sail", ".")
    ask = dict(max_new_tokens=4, method="ar", sampling=SamplingParams(temperature=0))
    for stop, text in (
        (" boat", ""),
        (" sail", " boats"),
        ("boats sa", " "),
        (" s", " boats"),
        ("a b", " boats sail."),
    ):
        out = dec.generate(prompt, stop=[stop], logits_hook=spelling(wanted, 2), **ask)
        assert out.text == text and out.finish_reason == ("length" if stop == "a b" else "stop")


@pytest.mark.parametrize("streamer_class", [TextStreamer, TextIteratorStreamer])
@pytest.mark.parametrize("settings_", [{}, {"skip_special_tokens": True}], ids=["all", "no special ones"])
@pytest.mark.parametrize("end", [["\u2581a"], ["'t", "\u2581"], ["s", "<|sys|>"], ["\u2581do", "<0xE2>"]], ids=str)
def test_a_streamer_that_skips_the_prompt_shows_what_tokens_add_to_it(streamer_class, settings_, end, capsys):
    dec = speaking()
    # Behind a new line a streamer of transformers begins anew, and runs of bytes may be shown as invalid as a whole.
    never = ids_of(dec.tokenizer, *BYTES, "\n")
    prompt = torch.tensor([ids_of(dec.tokenizer, "<s>", "\u2581boat", *end)])
    for skip in (True, False):
        streamer = streamer_class(dec.tokenizer, skip_prompt=skip, **settings_)
        generate = decoder.custom_generate(streamer=streamer)
        ids = dec.model.generate(prompt, custom_generate=generate, max_new_tokens=9, suppress_tokens=never)[0].tolist()
        shown = "".join(streamer) if streamer_class is TextIteratorStreamer else capsys.readouterr().out[:-1]
        whole = dec.tokenizer.decode(ids, **settings_)
        before = dec.tokenizer.decode(ids[: prompt.shape[1]], **settings_).rstrip(REPLACEMENT) if skip else ""
        assert shown == whole.removeprefix(before) and whole.startswith(before)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_ends"])
def test_tokens_have_the_text_that_they_add_behind_others(kind):
    """Of all tokens of the vocabulary; behind any word they add the same, which tells those with a space apart."""
    tokenizer = TOKENIZERS[kind]
    texts, pieces = TokenTexts(tokenizer), tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    words = [token for token, piece in enumerate(pieces) if piece not in BYTES and tokenizer.decode([token]).isalpha()]
    for token in range(len(tokenizer)):
        if token < 4:
            assert texts.text(token) == pieces[token] and token in texts.special
            continue
        for word in words[::7]:
            assert texts.text(token) == added(tokenizer, [word], [token])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_ends"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bytes_of_tokens_make_up_the_text_and_offsets_are_places_in_it(kind, data):
    tokenizer = TOKENIZERS[kind]
    if kind in ("llama", "gemma", "byte_level"):
        text = data.draw(st.text("a \u00e9\u20ac\U0001f40b\n", max_size=12))
        ids = tokenizer("a" + text + "s")["input_ids"]
    else:
        ids = [4, *data.draw(tokens(tokenizer))]
    cut = data.draw(st.integers(0, len(ids)))
    texts, prompt, ids = TokenTexts(tokenizer), ids[:cut], ids[cut:]
    text, offsets = streamed(tokenizer, prompt, ids), TextOffsets(texts, prompt)
    joined = b"".join(texts.bytes_of(token) for token in ids if token not in texts.special)
    if decoded(tokenizer, prompt):
        # A character that the prompt begins is the text's.
        assert text.encode().endswith(joined) and len(text.encode()) - len(joined) < 4
    before = whole_characters(tokenizer, prompt)
    expected = [whole_characters(tokenizer, [*prompt, *ids[:place]]) - before for place in range(len(ids))]
    assert places(offsets, ids) == expected


def places(offsets, ids):
    return [at for token in ids for at in offsets.next(token)] + offsets.rest()


def shown_bytes(tokenizer, ids):
    """The reference: each character shown, with the indices of the tokens whose bytes it shows.

    A run of tokens for bytes is shown as all that they spell, or each as invalid; other bytes as Python shows them.
    """
    runs = []
    for index, token in enumerate(ids):
        piece = tokenizer.convert_ids_to_tokens(token)
        kind = "special" if piece in SPECIAL else "byte" if piece in BYTES else "other"
        data = bytes([BYTES.index(piece)]) if kind == "byte" else TokenTexts(tokenizer).bytes_of(token)
        if kind != "special":
            runs.append((kind, [])) if not runs or runs[-1][0] != kind else None
            runs[-1][1].extend((byte, index) for byte in data)
    for kind, run in runs:
        left = [byte for byte, _ in run]
        while left:
            # The longest beginning that is one character, or a part of one.
            for size in range(min(4, len(left)), 0, -1):
                one = bytes(left[:size]).decode(errors="replace")
                if len(one) == 1:
                    break
            if kind == "byte" and REPLACEMENT in bytes(byte for byte, _ in run).decode(errors="replace"):
                one, size = REPLACEMENT, 1
            yield one, {index for _, index in run[len(run) - len(left) :][:size]}
            del left[:size]


@pytest.mark.parametrize("kind", ["llama", "gemma", "byte_level"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_offsets_are_places_in_the_text_where_bytes_are_invalid(kind, data):
    tokenizer = TOKENIZERS[kind]
    pieces = [*tokenizer.convert_ids_to_tokens(tokenizer("a\u00e9\u20ac\U0001f40b")["input_ids"]), "boat", "<|sys|>"]
    some = ids_of(tokenizer, *pieces)
    ids = data.draw(st.lists(st.sampled_from(some), max_size=14))
    prompt = ids_of(tokenizer, "boat")
    shown = list(shown_bytes(tokenizer, ids))
    text = "".join(one for one, _ in shown)
    assert text == streamed(tokenizer, prompt, ids)
    begins = {}
    for at, (_, tokens_) in enumerate(shown):
        for index in tokens_:
            begins.setdefault(index, at)
    end, expected = len(text), []
    for index in reversed(range(len(ids))):
        end = begins.get(index, end)
        expected.insert(0, end)
    assert places(TextOffsets(TokenTexts(tokenizer), prompt), ids) == expected


def test_offsets_in_a_long_run_of_bytes_are_places_in_what_a_stream_shows():
    tokenizer = TOKENIZERS["llama"]
    ids = tokenizer("\u20ac" * 40)["input_ids"][:-1]
    text, found = streamed(tokenizer, [], ids), places(TextOffsets(TokenTexts(tokenizer), []), ids)
    assert text.count("\u20ac") > 10 and text.endswith(2 * REPLACEMENT)
    assert len(found) == len(ids) and found == sorted(found) and set(found) == set(range(len(text)))


@pytest.fixture(scope="module")
def server():
    dec = speaking()
    dec.tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with served(dec) as running:
        running.dec = dec
        yield running


@pytest.mark.parametrize("seed", range(4))
def test_the_server_gives_tokens_with_their_spaces_and_bytes_of_parts_of_characters(server, seed):
    tokenizer, texts = server.dec.tokenizer, TokenTexts(server.dec.tokenizer)
    body = {"prompt": "a boat", "max_tokens": 40, "seed": seed, "logprobs": 5, "ignore_eos": True}
    choice = server.post(body, "/v1/completions").json()["choices"][0]
    prompt = tokenizer("a boat")["input_ids"]
    out = server.dec.generate(prompt, 40, "ar", SamplingParams(seed=seed), ignore_eos=True, top_logprobs=5)
    assert choice["text"] == out.text
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"] == places(TextOffsets(texts, prompt), out.token_ids)
    for token, shown, likely, of_token in zip(
        out.token_ids, logprobs["tokens"], logprobs["top_logprobs"], out.top_logprobs, strict=True
    ):
        data = texts.bytes_of(token)
        assert shown == texts.text(token) or shown == "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        # Llama 2's vocabulary has letters as words and as bytes.
        assert len(likely) == len({texts.bytes_of(one) for one in [token, *dict(of_token)]})
    body = {"messages": [{"role": "user", "content": "a boat"}], "max_tokens": 40, "seed": seed, "ignore_eos": True}
    chat = server.post({**body, "logprobs": True, "top_logprobs": 20}, "/v1/chat/completions").json()["choices"][0]
    out = server.dec.generate(body["messages"], 40, "ar", SamplingParams(seed=seed), ignore_eos=True, top_logprobs=20)
    assert chat["message"]["content"] == out.text
    for entry, token, of_token in zip(chat["logprobs"]["content"], out.token_ids, out.top_logprobs, strict=True):
        assert bytes(entry["bytes"]) == texts.bytes_of(token)
        assert [bytes(one["bytes"]) for one in entry["top_logprobs"]] == [texts.bytes_of(one) for one, _ in of_token]


def test_a_completion_streams_the_offsets_of_its_whole_text(server):
    body = {"prompt": ["a boat", [1]], "max_tokens": 30, "seed": 3, "logprobs": 1, "ignore_eos": True, "n": 2}
    whole = server.post(body, "/v1/completions").json()["choices"]
    events = server.post({**body, "stream": True}, "/v1/completions").text.split("\n\n")
    offsets = {index: [] for index in range(4)}
    for event in events:
        if event.startswith("data: {"):
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                offsets[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
    for index, choice in enumerate(whole):
        assert offsets[index] == choice["logprobs"]["text_offset"]
        assert max(offsets[index]) <= len(choice["text"])
