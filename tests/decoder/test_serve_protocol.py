"""The smaller parts of the protocol: echo, best_of, tokens of texts, what the server tells of itself."""

import jsonschema
import pytest

from decoder import SamplingParams
from decoder.prefix_reuse import PrefixReuse

from .serving import CHAT, calling_decoder, served, served_by

dec, server = served_by(calling_decoder, max_tokens=200)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_echo_begins_with_the_prompt(server, dec, stream):
    ids = dec.tokenizer.encode("It was")
    for prompt in (["Call me", "It was"], [ids]):
        asked = dict(model="tiny", prompt=prompt, max_tokens=9, seed=2, echo=True)
        texts = [""] * len(prompt)
        if stream:
            for chunk in server.openai.completions.create(**asked, stream=True):
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            texts = [choice.text for choice in server.openai.completions.create(**asked).choices]
        begun = ["It was" if one is ids else one for one in prompt]
        assert texts == [one + dec.generate(one, 9, sampling=SamplingParams(seed=2)).text for one in begun]


def test_the_best_of_several_texts_are_the_likeliest_per_token(server, dec):
    prompts = ["Call me", "It was"]
    asked = dict(model="tiny", prompt=prompts, max_tokens=9, seed=5, best_of=5)
    got = server.openai.completions.create(**asked, n=2, logprobs=0)
    best = []
    for prompt in prompts:
        outs = [dec.generate(prompt, 9, "ar", SamplingParams(seed=5 + i), return_logprobs=True) for i in range(5)]
        ranked = sorted(outs, key=lambda out: -sum(out.logprobs) / len(out.logprobs))
        best += [out.text for out in ranked[:2]]
    assert [choice.text for choice in got.choices] == best and [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert got.usage.completion_tokens == 90 and got.choices[0].logprobs is not None
    plain = server.openai.completions.create(**asked)
    assert [choice.text for choice in plain.choices] == best[::2] and plain.choices[0].logprobs is None


def test_tokens_taken_over_from_earlier_texts_are_told(dec, monkeypatch):
    """The next turn of a chat finds the last one's in the cache."""
    monkeypatch.setattr(dec, "prefixes", PrefixReuse(dec.target, 2**24))
    with served(dec, max_tokens=200) as server:
        first = server.post({"messages": CHAT, "max_tokens": 20, "seed": 1}, "/v1/chat/completions").json()
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        again = server.post({"messages": CHAT, "max_tokens": 20, "seed": 1}, "/v1/chat/completions").json()
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < again["usage"]["prompt_tokens"]
        assert again["choices"] == first["choices"]
        assert again["system_fingerprint"] == first["system_fingerprint"] and first["system_fingerprint"][:3] == "ts_"


def test_texts_and_chats_become_tokens_and_text_again(server, dec):
    text = "Call me <|im_end|> \u00e9"
    ids = dec.tokenizer.encode(text)
    got = server.post({"prompt": text, "return_token_strs": True}, "/tokenize").json()
    assert got["tokens"] == ids and got["count"] == len(ids) and len(got["token_strs"]) == len(ids)
    assert server.post({"content": text}, "/tokenize").json()["tokens"] == ids
    back = server.post({"tokens": ids}, "/detokenize").json()
    assert back["prompt"] == back["content"] == text
    kwargs = {"enable_thinking": False}
    chat = server.post({"messages": CHAT, "chat_template_kwargs": kwargs}, "/tokenize").json()["tokens"]
    assert chat == dec.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, **kwargs)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "one of"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "one of"),
        ("/tokenize", {"prompt": 3}, "prompt must be text"),
        ("/tokenize", {"text": "a"}, "text is no known field"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [1, 10**6]}, "outside the vocabulary"),
        ("/detokenize", {"tokens": "a"}, "tokens must be"),
        ("/detokenize", [1], "JSON object"),
    ],
)
def test_what_cannot_become_tokens_or_text_is_a_400(server, path, body, words):
    answer = server.post(body, path)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_the_server_tells_of_itself(server, dec):
    assert server.http.get("/version").json()["version"]
    props = server.http.get("/props").json()
    assert props["total_slots"] == 16 and props["chat_template"] == dec.tokenizer.chat_template
    assert props["default_generation_settings"]["n_ctx"] == dec.model.config.max_position_embeddings


def test_the_description_fits_what_is_taken(server):
    described = server.http.get("/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    for path, body in (
        ("/v1/completions", {"prompt": ["a", [1, 2]], "max_tokens": 3, "logit_bias": {"3": 1.5}, "stop": ["x"]}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "tool_choice": "auto", "top_p": 0.5, "n": 2}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(body, schema)
        assert server.post(body, path).status_code == 200
        for name in body:
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**body, name: None}, schema)
    for path in described["paths"]:
        assert server.http.request("OPTIONS", path).status_code == 405, path
