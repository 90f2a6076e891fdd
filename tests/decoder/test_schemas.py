"""Outputs under twenty schemas: each parses, holds to its schema, and is plain decoding's text, whatever drafts."""

import json
from dataclasses import replace

import pytest

from decoder import Decoder, SamplingParams, constraints, methods

from .conftest import all_heads, tiny_llama
from .test_grammars import byte_level

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


def thing(required=None, **properties):
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def text(longest=6, **more):
    return {"type": "string", "maxLength": longest, **more}


def numbers(kind="integer", **more):
    return {"type": kind, **more}


def listed(of, most=3, **more):
    return {"type": "array", "items": of, "maxItems": most, **more}


SCHEMAS = {
    # As the examples of json-schema.org, with bounds, so that a random model comes to an end.
    "person": thing(firstName=text(), lastName=text(), age=numbers(minimum=0, maximum=130)),
    "place": thing(latitude=numbers("number", minimum=-90, maximum=90), longitude=numbers("number", maximum=180)),
    "vegetables": {
        **thing(["fruits"], fruits=listed(text()), vegetables=listed({"$ref": "#/$defs/veggie"}, 2)),
        "$defs": {"veggie": thing(veggieName=text(), veggieLike={"type": "boolean"})},
    },
    "event": thing(
        ["startDate", "summary"],
        startDate=text(pattern="^[0-9]{4}-[01][0-9]$", longest=7),
        summary=text(),
        geo={"anyOf": [thing(lat=numbers(maximum=9, minimum=0)), {"type": "null"}]},
    ),
    "address": thing(street=text(), post={"enum": ["4711", "90210"]}, country={"const": "NL"}),
    "disk": {
        "oneOf": [thing(type={"const": "disk"}, device=text()), thing(type={"const": "nfs"}, server=text())],
    },
    "movie": thing(title=text(), year=numbers(minimum=1900, maximum=2099), genre={"enum": ["Action", "Comedy"]}),
    "job": thing(title=text(), salary=numbers("number", minimum=0, maximum=9), tags=listed(text(3), minItems=1)),
    "order": thing(
        id=text(pattern="^[A-F]{3}[0-9]{2}$", longest=5),
        items=listed(thing(sku={"enum": ["a", "b"]}, count=numbers(minimum=1, maximum=12)), 2, minItems=1),
        total=numbers("number", minimum=0, maximum=99),
    ),
    "device": thing(
        kind={"enum": ["phone", "laptop"]}, specs=thing(ram={"enum": [8, 16]}, screen={"type": ["null", "boolean"]})
    ),
    # Each for one thing.
    "recursive list": thing(value={"type": "boolean"}, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "recursive tree": thing(leaf={"enum": [1, 2]}, children=listed({"$ref": "#"}, 1)),
    "enum of all types": {"enum": [None, True, 0, -1.5, 'a"b\\', [1, {"x": "y"}], {"k": []}]},
    "lengths": text(5, minLength=4),
    "numbers": listed(numbers(multipleOf=7, minimum=-70, maximum=700), 4, minItems=2),
    "exclusive bounds": numbers("number", exclusiveMinimum=0, exclusiveMaximum=1),
    "union of types": listed({"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 99}, 4, minItems=1),
    "nested unions": {"anyOf": [thing(a={"anyOf": [{"const": 1}, {"const": "one"}]}), listed({"const": "x"}, 2)]},
    "tuple": {
        "type": "array",
        "prefixItems": [{"enum": ["x", "y"]}, numbers(minimum=1, maximum=3)],
        "items": False,
        "minItems": 2,
    },
    "allOf": {"allOf": [numbers(minimum=10), {"maximum": 20}]},
}
LENGTH = 160
DRAFTING = [method for method in methods() if method not in ("ar", "triforce")]


@pytest.fixture(scope="module")
def dec():
    tokenizer = byte_level()
    model = tiny_llama(vocab_size=len(tokenizer))
    draft = tiny_llama(seed=1, vocab_size=len(tokenizer))
    return Decoder(model, tokenizer, all_heads(model), draft_model=draft)


def samplings(dec, name):
    """Greedy, and sampled with five seeds."""
    strict = constraints.json_schema(SCHEMAS[name], any_whitespace=False)
    sampled = SamplingParams(temperature=1.2, constraint=strict)
    return [SamplingParams(temperature=0, constraint=strict), *(replace(sampled, seed=seed) for seed in range(5))]


@pytest.fixture(scope="module")
def plain(dec):
    asked = [one for name in SCHEMAS for one in samplings(dec, name)]
    prompts = ["Write JSON: "] * len(asked)
    return dict(zip(_keys(), dec.generate_batch(prompts, LENGTH, "ar", asked, return_logprobs=True), strict=True))


def _keys():
    return [(name, index) for name in SCHEMAS for index in range(6)]


def held(name, out):
    """Whether a complete output holds to its schema; None where it was cut short, which is told."""
    if out.finish_reason == "length":
        return None
    value = json.loads(out.text)
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(value)
    return True


@pytest.mark.slow
def test_texts_hold_to_their_schemas(plain):
    complete = [held(name, out) for (name, _), out in plain.items()]
    assert complete.count(True) > 0.8 * len(complete)
    assert len({out.text for out in plain.values()}) > 0.6 * len(plain), "the texts hardly differ"


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFTING)
def test_every_method_gives_the_same_texts(dec, plain, method):
    """In batches, 120 for each method: more than a thousand in all."""
    asked = [one for name in SCHEMAS for one in samplings(dec, name)]
    outs = dec.generate_batch(["Write JSON: "] * len(asked), LENGTH, method, asked, return_logprobs=True)
    for (name, index), out in zip(_keys(), outs, strict=True):
        expected = plain[name, index]
        assert out.token_ids == expected.token_ids and out.finish_reason == expected.finish_reason, (name, index)
        assert out.logprobs == pytest.approx(expected.logprobs, abs=1e-9), (name, index)
        held(name, out)


@pytest.mark.parametrize("name", ["recursive tree", "order"])
def test_alone_they_are_the_same(dec, name):
    """Cheap enough for every run."""
    for sampling in samplings(dec, name)[:2]:
        outs = [dec.generate("Write JSON: ", 60, method, sampling) for method in ("ar", "auto", "tokenswift")]
        assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids
        held(name, outs[0])
