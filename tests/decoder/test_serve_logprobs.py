"""The server's log-probabilities: those of `Decoder.generate`, in the shapes of OpenAI's protocol."""

import pytest
import torch

from decoder import Decoder, SamplingParams

from ..tiny import byte_tokenizer
from .conftest import tiny_llama
from .serving import CHAT, byte_of, name_of, served, served_by, speaking_decoder

dec, server = served_by(speaking_decoder)


def entries(dec, likely):
    """The most likely tokens of a position as a chat gives them, with values that are compared up to rounding."""
    letters = [(token, dec.tokenizer.decode([token]), value) for token, value in likely]
    return [(text, pytest.approx(value), [byte_of(dec, token)]) for token, text, value in letters]


@pytest.mark.parametrize("method", [None, "ar", "tokenswift"])
def test_the_most_likely_tokens_of_a_chat_are_those_of_generate(server, dec, method):
    asked = dict(model="tiny", messages=CHAT, max_tokens=30, seed=5, n=2, logprobs=True, extra_body={"method": method})
    whole = server.openai.chat.completions.create(**asked, top_logprobs=20)
    streamed = [[], []]
    for chunk in server.openai.chat.completions.create(**asked, top_logprobs=20, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    for index, choice in enumerate(whole.choices):
        expected = dec.generate(CHAT, 30, "ar", SamplingParams(seed=5 + index), return_logprobs=True, top_logprobs=20)
        for content in (choice.logprobs.content, streamed[index]):
            assert [one.logprob for one in content] == pytest.approx(expected.logprobs)
            found = [[(top.token, top.logprob, top.bytes) for top in one.top_logprobs] for one in content]
            assert found == [entries(dec, likely) for likely in expected.top_logprobs]
    for fields in ({}, {"top_logprobs": 0}, {"top_logprobs": None}):
        content = server.openai.chat.completions.create(**asked, **fields).choices[0].logprobs.content
        assert all(one.top_logprobs == [] for one in content)
    # As many as filters leave.
    content = server.openai.chat.completions.create(**asked, top_logprobs=3, top_p=1e-6).choices[0].logprobs.content
    assert [len(one.top_logprobs) for one in content] == [1] * 30


@pytest.mark.parametrize("number", [0, 1, 5])
def test_the_most_likely_tokens_of_a_completion_are_those_of_generate(server, dec, number):
    asked = dict(model="tiny", prompt="Call me", max_tokens=40, seed=2, logprobs=number)
    whole = server.openai.completions.create(**asked).choices[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in server.openai.completions.create(**asked, stream=True)]
    streamed = [likely for piece in pieces if piece for likely in piece.top_logprobs or []]
    out = dec.generate("Call me", 40, "ar", SamplingParams(seed=2), return_logprobs=True, top_logprobs=number)
    if not number:
        assert whole.top_logprobs is None and streamed == []
        return
    expected = []
    for token, logprob, likely in zip(out.token_ids, out.logprobs, out.top_logprobs, strict=True):
        of_name = {name_of(dec, one): value for one, value in [*likely, (token, logprob)]}
        assert len(of_name) == len({one for one, _ in likely} | {token})
        expected.append(pytest.approx(of_name))
    assert whole.top_logprobs == expected and streamed == expected
    assert any(len(likely) == number + 1 for likely in whole.top_logprobs)
    for token, logprob, likely in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert likely[token] == logprob


@pytest.mark.parametrize(
    "fields",
    [
        *({"logprobs": True, "top_logprobs": value} for value in (-1, 21, True, "3", 1.5)),
        *({"logprobs": value, "top_logprobs": 3} for value in (None, False)),
        {"top_logprobs": 3},
        *({"logprobs": value} for value in (1, "yes")),
    ],
    ids=str,
)
def test_log_probabilities_that_a_chat_cannot_have_are_a_400(server, fields):
    answer = server.post({"messages": CHAT, "max_tokens": 2, **fields}, "/v1/chat/completions")
    error, name = answer.json()["error"], "top_logprobs" if "top_logprobs" in fields else "logprobs"
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == name and name in error["message"] and "\n" not in error["message"]


def test_a_vocabulary_that_is_smaller_than_what_is_asked_for_comes_as_a_whole():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "!#$"  # the first tokens of the alphabet, all that the model knows
    with served(Decoder(tiny_llama(vocab_size=12), tokenizer)) as server:
        asked = dict(model="tiny", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=20)
        content = server.openai.chat.completions.create(**asked).choices[0].logprobs.content
        assert [len(one.top_logprobs) for one in content] == [12] * 3


def expected_of_prompt(dec, prompt, most_likely):
    """The log-probabilities of a prompt by transformers' model: by token, None for the first one."""
    ids = dec.tokenizer.encode(prompt)
    with torch.no_grad():
        logprobs = dec.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    found = [(None, None)]
    for row, token in zip(logprobs, ids[1:], strict=False):
        values, likely = row.topk(most_likely)
        tops = {name_of(dec, int(one)): float(value) for one, value in zip(likely, values, strict=True)}
        found.append((float(row[token]), {**tops, name_of(dec, token): float(row[token])}))
    return ids, found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("new", [0, 6])
def test_an_echoed_prompt_has_those_of_the_model_itself(server, dec, stream, new):
    """Behind it come those of `generate`, whose places go on where the prompt ends."""
    prompts, sampling = ["Call me \u20ac or not, " + "so it goes " * 9, "It"], dict(temperature=0.7, top_p=0.9, seed=4)
    asked = dict(model="tiny", prompt=prompts, max_tokens=new, logprobs=3, echo=True, **sampling)
    told = [dict.fromkeys(("tokens", "token_logprobs", "top_logprobs", "text_offset"), ()) for _ in prompts]
    texts = ["", ""]
    answers = server.openai.completions.create(**asked, stream=stream)
    for answer in answers if stream else [answers]:
        for choice in answer.choices:
            texts[choice.index] += choice.text
            for name, value in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                told[choice.index][name] += tuple(value)
    for prompt, text, found in zip(prompts, texts, told, strict=True):
        out = dec.generate(prompt, new, "ar", SamplingParams(**sampling), return_logprobs=True, top_logprobs=3)
        ids, expected = expected_of_prompt(dec, prompt, 3)
        count = len(ids)
        assert text == prompt + out.text and found["tokens"] == tuple(name_of(dec, one) for one in ids + out.token_ids)
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:count] == pytest.approx([value for value, _ in expected[1:]])
        assert list(found["top_logprobs"][1:count]) == [pytest.approx(tops) for _, tops in expected[1:]]
        assert found["token_logprobs"][count:] == pytest.approx(out.logprobs)
        assert len(found["text_offset"]) == count + new and sorted(found["text_offset"]) == list(found["text_offset"])
        for name, at in zip(found["tokens"], found["text_offset"], strict=True):
            if not name.startswith("bytes:"):
                assert text.startswith(name, at)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_those_of_a_prompt_come_as_vllm_gives_them(server, dec, path):
    chat = "chat" in path
    asked = {"messages": CHAT} if chat else {"prompt": "Call me"}
    body = server.post({**asked, "max_tokens": 2, "seed": 1, "n": 2, "prompt_logprobs": 2}, path).json()
    prompt = dec.tokenizer.apply_chat_template(CHAT, tokenize=False) if chat else "Call me"
    ids, expected = expected_of_prompt(dec, prompt, 2)
    for found in [body["prompt_logprobs"]] if chat else [choice["prompt_logprobs"] for choice in body["choices"]]:
        assert found[0] is None and len(found) == len(ids)
        for token, one, (value, tops) in zip(ids[1:], found[1:], expected[1:], strict=True):
            own = one[str(token)]
            assert own["logprob"] == pytest.approx(value) and own["decoded_token"] == dec.tokenizer.decode([token])
            assert {name_of(dec, int(other)): each["logprob"] for other, each in one.items()} == pytest.approx(tops)
            ranks = [each["rank"] for each in one.values()]
            assert ranks[:2] == [1, 2] and (len(one) == 2 or own["rank"] > 2)
    streamed = server.post({**asked, "stream": True, "prompt_logprobs": 0}, path)
    assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "prompt_logprobs"
