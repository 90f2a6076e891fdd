"""Answers of the server in a given shape: by every field that asks for one the text of plain decoding under it."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
from pydantic import BaseModel

from decoder import SamplingParams, constraints

from .serving import CHAT, served_by, speaking_decoder

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["pilot", "cook"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
LARK = 'start: "a" | "(" start ")"'
GBNF = 'root ::= "a" | "(" root ")"'
STRICT = {"name": "person", "description": "Who", "strict": True, "schema": SCHEMA}
ON_ONE_LINE = constraints.json_schema(SCHEMA, any_whitespace=False)
ASKING = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": STRICT}},
        constraints.json_schema(SCHEMA),
    ),
    "json_object": ({"response_format": {"type": "json_object"}}, constraints.json_schema({"type": "object"})),
    "llama.cpp's format": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        constraints.json_schema(SCHEMA),
    ),
    "text": ({"response_format": {"type": "text"}, "grammar": "", "regex": ""}, None),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, constraints.json_schema(SCHEMA)),
    "schema": ({"json_schema": SCHEMA}, constraints.json_schema(SCHEMA)),
    "guided_regex": ({"guided_regex": "[a-c]{3}"}, constraints.regex("[a-c]{3}")),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, constraints.choice(["yes", "no"])),
    "guided_grammar": ({"guided_grammar": LARK}, constraints.grammar(LARK)),
    "grammar": ({"grammar": GBNF}, constraints.grammar(GBNF)),
    "structured json": ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ON_ONE_LINE),
    "structured regex": ({"structured_outputs": {"regex": "[0-9]+x"}}, constraints.regex("[0-9]+x")),
}


dec, server = served_by(speaking_decoder, max_tokens=400)


@pytest.mark.parametrize(("name", "chat"), [(name, index % 2 == 0) for index, name in enumerate(ASKING)])
def test_the_answer_is_that_of_plain_decoding_under_the_constraint(server, dec, name, chat):
    fields, constraint = ASKING[name]
    path, prompt = ("/v1/chat/completions", {"messages": CHAT}) if chat else ("/v1/completions", {"prompt": "Call me"})
    answer = server.post({**prompt, "max_tokens": 60, "seed": 3, "n": 2, **fields}, path).json()
    for choice in answer["choices"]:
        sampling = SamplingParams(seed=3 + choice["index"], constraint=constraint)
        expected = dec.generate(CHAT if chat else "Call me", 60, "ar", sampling)
        assert (choice["message"]["content"] if chat else choice["text"]) == expected.text
        assert choice["finish_reason"] == expected.finish_reason


def test_a_stream_in_a_shape_with_logprobs_is_the_whole_answer(server):
    asked = dict(model="tiny", messages=CHAT, max_tokens=90, seed=5, n=3, logprobs=True, top_logprobs=2)
    asked |= dict(extra_body={"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}})
    whole = server.openai.chat.completions.create(**asked)
    texts, logprobs = [""] * 3, [[] for _ in range(3)]
    for chunk in server.openai.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice in whole.choices:
        assert choice.message.content == texts[choice.index]
        # In float64 the last digit follows from which texts share a pass.
        assert [one.bytes for one in choice.logprobs.content] == [one.bytes for one in logprobs[choice.index]]
        for one, streamed in zip(choice.logprobs.content, logprobs[choice.index], strict=True):
            found, expected = (
                {top.token: top.logprob for top in (each, *each.top_logprobs)} for each in (streamed, one)
            )
            assert found == pytest.approx(expected, abs=1e-9)
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        forced = [one for one in choice.logprobs.content if one.logprob == 0]
        assert len(forced) >= len('{"age": , "kind": ""}') - 2 and all(len(one.top_logprobs) == 1 for one in forced)


def test_the_client_parses_answers_into_pydantics_models(server):
    class Person(BaseModel):
        age: Literal[7, 12]
        kind: Literal["pilot", "cook"]

    got = server.openai.chat.completions.parse(
        model="tiny",
        messages=CHAT,
        response_format=Person,
        max_tokens=400,
        seed=1,
        logit_bias={"32": -100, "201": -100},
    )
    assert got.choices[0].message.parsed.kind in ("pilot", "cook")


DEEP = {"type": "object"}
for _ in range(30):
    DEEP = {"allOf": [DEEP, {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}]}
BAD = {
    "no schema": ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
    "no type": ({"json_schema": {"schema": {}}}, "response_format.type"),
    "unknown type": ({"type": "yaml"}, "response_format.type"),
    "unknown name": ({"type": "json_schema", "json_schema": {"shema": {}}}, "response_format.json_schema.shema"),
    "not to be met": ({"type": "integer", "minimum": 5, "maximum": 3}, "cannot be kept"),
    "never ends": ({"$ref": "#"}, "schema"),
    "explodes": ({"type": "string", "pattern": "((a|b){1,1000}){1,1000}"}, "pattern"),
    "multiplies": (DEEP, "schema"),
    "unknown keyword": ({"type": "object", "unevaluatedProperties": {"$dynamicRef": "#x"}}, "schema"),
    "elsewhere": ({"$ref": "http://127.0.0.1:1/schema"}, "cannot be kept"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_schema_that_cannot_be_kept_is_a_400_with_the_place(server, name):
    value, words = BAD[name]
    if "place" not in name and words.startswith("response_format"):
        field = {"response_format": value}
    else:
        field = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}
    began = time.process_time()
    answer = server.post({"messages": CHAT, **field}, "/v1/chat/completions")
    error = answer.json()["error"]
    assert answer.status_code == 400 and time.process_time() - began < 1
    assert error["param"] == "response_format" and error["message"].startswith("response_format")
    assert words in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_grammar", "start: start"),
        ("guided_grammar", 'start: "a" start'),
        ("guided_grammar", "start: nowhere"),
        ("grammar", 'root ::= "' + "a" * 10 * 2**20 + '"'),
        ("grammar", "root ::= " + "(" * 5000),
        ("grammar", "rood ::= nowhere"),
        ("regex", "((a{1,900}){1,900}){1,900}"),
        ("guided_regex", "(?=a)b"),
        ("guided_regex", "a("),
        ("guided_json", "{"),
        ("guided_choice", []),
        ("structured_outputs", {"json": {}, "regex": "a"}),
        ("structured_outputs", {"yaml": True}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_grammars_that_cannot_be_kept_are_a_400_and_others_go_on(server, field, value):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.post, dict(prompt="Call me", max_tokens=100, seed=1, ignore_eos=True))
        began = time.process_time()  # the other text's included
        answer = server.post({"prompt": "x", field: value})
        assert answer.status_code == 400 and time.process_time() - began < 2
        error = answer.json()["error"]
        assert error["param"] == field and error["message"].startswith(field) and len(error["message"]) < 700
        assert other.result().status_code == 200


def test_two_shapes_at_once_are_a_400(server):
    answer = server.post({"prompt": "x", "guided_regex": "a", "response_format": {"type": "json_object"}})
    assert answer.status_code == 400 and "send one of them" in answer.json()["error"]["message"]


def test_many_in_shapes_at_once_are_each_the_text_they_would_be_alone(server, dec):
    bodies = [
        dict(prompt="Call me " * (1 + i % 3), max_tokens=30, seed=i, **ASKING[name][0]) for i, name in enumerate(ASKING)
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.post, bodies))
    for body, answer, name in zip(bodies, answers, ASKING, strict=True):
        sampling = SamplingParams(seed=body["seed"], constraint=ASKING[name][1])
        text = answer.json()["choices"][0]["text"]
        assert text == dec.generate(body["prompt"], 30, "ar", sampling).text, name
