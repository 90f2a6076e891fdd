"""Constraints by llguidance, with tokenizers of several kinds: masks that follow from the tokens alone."""

import json
import random
import time
from itertools import product

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from decoder import Decoder, SamplingParams, constraints, methods
from decoder.constraints import Vocabulary
from decoder.sampling.constraint_path import ConstraintPath

from .. import tiny
from ..tiny import LETTERS, joined
from . import tokenizers_of_kinds
from .conftest import all_heads, some, tiny_llama

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["pilot", "passenger"]},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"value": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
TREES = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#"}}},
    "required": ["value", "children"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": constraints.json_schema(PERSON),
    "schema on one line": constraints.json_schema(PERSON, any_whitespace=False),
    "recursive schema": constraints.json_schema(json.dumps(TREE), any_whitespace=False),
    "recursive schema, any whitespace": constraints.json_schema(TREES),
    "pattern": constraints.regex(r"[A-Z]{2}-[0-9]{3,5}( ok)?"),
    "grammar": constraints.grammar('start: term (" + " term)*\nterm: "a" | "(" start ")" | /[0-9]{1,3}/'),
    "choice": constraints.choice(["yes", "no", 'yesterday "é\\', "ニ"]),
}


def byte_level():
    """Byte-level BPE with merges, as in GPT-2, Llama 3, Qwen and SmolLM2."""
    merges = [
        ("n", "a"),
        ("m", "e"),
        ("na", "me"),
        ('"', ":"),
        ("{", '"'),
        ("p", "i"),
        ('"', ","),
        ("0", "0"),
        ("Ġ", '"'),
    ]
    tokenizer = tiny.byte_level(["<|end|>", "<|other|>", *LETTERS, *joined(merges)], merges)
    tokenizer.add_special_tokens(["<|end|>", "<|other|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZERS = {"byte level": byte_level, "SentencePiece": tokenizers_of_kinds.llama, "Gemma": tokenizers_of_kinds.gemma}


def vocabulary_of(tokenizer, ends=True, more=0):
    ids = frozenset([tokenizer.eos_token_id] if ends else [])
    return Vocabulary(len(tokenizer) + more, tokenizer, ids, ids)


def wander(path, draw, most=60):
    """A random text within a constraint, to the end or ``most`` tokens."""
    tokens = []
    while len(tokens) < most:
        allowed = path.mask(path.end).nonzero()[:, 0].tolist()
        if not allowed:
            break
        tokens.append(draw.choice(allowed))
        path.push(tokens[-1])
        if tokens[-1] in path._ends:
            break
    return tokens


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_follow_from_the_tokens_alone(kind, name):
    """What was asked before, along other paths, changes nothing: else drafts could change the text."""
    tokenizer, draw = TOKENIZERS[kind](), random.Random(1)
    vocabulary = vocabulary_of(tokenizer)
    for _ in range(6):
        plain, drafted = (ConstraintPath(GRAMMARS[name].start(vocabulary), vocabulary) for _ in range(2))
        for token in wander(ConstraintPath(GRAMMARS[name].start(vocabulary), vocabulary), draw):
            # Drafts: along the mask, along what is forced, and along tokens that may not follow.
            for _ in range(4):
                node = drafted.end
                for _ in range(draw.randrange(5)):
                    asked = draw.randrange(3)
                    if asked == 0 and (chain := drafted.forced(node)):
                        node = drafted.child(node, chain[0])
                    else:
                        choices = drafted.mask(node).nonzero()[:, 0].tolist() if asked == 1 else range(len(tokenizer))
                        node = drafted.child(node, draw.choice(choices)) if choices else None
                    if node is None or node.token in vocabulary.end_ids:
                        break
                    assert drafted.mask(node).any()
            expected = plain.mask(plain.end)
            assert torch.equal(drafted.mask(drafted.end), expected)
            assert bool(expected[token])
            for path in (plain, drafted):
                path.push(token)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_what_drafts_are_told_is_what_masks_say(kind, name):
    tokenizer, draw = TOKENIZERS[kind](), random.Random(2)
    vocabulary, told = vocabulary_of(tokenizer), 0
    for _ in range(6):
        state = GRAMMARS[name].start(vocabulary)
        for token in wander(ConstraintPath(GRAMMARS[name].start(vocabulary), vocabulary), draw):
            mask, forced = state.mask(), list(state.forced())
            if forced:
                told += 1
                for index, one in enumerate(forced):
                    assert state.mask().nonzero()[:, 0].tolist() == [one]
                    if one not in vocabulary.end_ids:
                        state.advance(one)
                    elif index + 1 < len(forced):
                        raise AssertionError("tokens behind an end token")
                state.rewind(sum(one not in vocabulary.end_ids for one in forced))
                assert torch.equal(state.mask(), mask)
            else:
                assert [state.allows(one) for one in range(len(tokenizer))] == mask.tolist()
            if token in vocabulary.end_ids:
                break
            state.advance(token)
    assert told or name in ("grammar", "pattern", "schema")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_whole_texts_hold_to_what_was_asked(kind):
    tokenizer, draw, whole = TOKENIZERS[kind](), random.Random(3), 0
    vocabulary = vocabulary_of(tokenizer, more=7)
    for name in ("schema on one line", "recursive schema", "choice", "pattern"):
        for _ in range(8):
            path = ConstraintPath(GRAMMARS[name].start(vocabulary), vocabulary)
            tokens = wander(path, draw, 200)
            assert not any(token >= len(tokenizer) for token in tokens)
            if tokens[-1] != tokenizer.eos_token_id:
                continue
            whole, text = whole + 1, b"".join(piece(tokenizer, token) for token in tokens[:-1]).decode()
            if name == "choice":
                assert text in json.loads(GRAMMARS[name].source)
            elif "schema" in name:
                jsonschema.validate(json.loads(text), PERSON if "line" in name else TREE)
    assert whole > 12


def piece(tokenizer, token):
    """The bytes of a token."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    if "\u2581" in tokenizer.get_vocab():
        return name.replace("\u2581", " ").encode()
    return bytes(_BYTES[letter] for letter in name)


def _bytes_of_letters():
    """GPT-2's letters for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {chr(byte): byte for byte in plain}, 0
    for byte in range(256):
        if byte not in plain:
            letters[chr(256 + extra)] = byte
            extra += 1
    return letters


_BYTES = _bytes_of_letters()


def tokens_of(text, constraint, tokenizer):
    """The tokens of a text under a constraint, the longest that may follow first."""
    vocabulary, rest, tokens = vocabulary_of(tokenizer), text.encode(), []
    path = ConstraintPath(constraint.start(vocabulary), vocabulary)
    while rest:
        pieces = {token: piece(tokenizer, token) for token in path.mask(path.end).nonzero()[:, 0].tolist()}
        fitting = [token for token, each in pieces.items() if rest.startswith(each)]
        tokens.append(max(fitting, key=lambda token: len(pieces[token])))
        path.push(tokens[-1])
        rest = rest[len(pieces[tokens[-1]]) :]
    return tokens


DECODED = ("byte level", "SentencePiece")


@pytest.fixture(scope="module", params=DECODED)
def decoding(request):
    tokenizer = TOKENIZERS[request.param]()
    model = tiny_llama(vocab_size=len(tokenizer) + 4)
    small = tiny_llama(seed=2, num_hidden_layers=1, vocab_size=len(tokenizer) + 4)
    return Decoder(model, tokenizer, heads=all_heads(model), draft_model=small)


FEW = ("auto", "draft-model")


# What differs by method holds for any constraint: `test_constrained.py`. How a token is chosen under a mask does not
# depend on the tokenizer.
@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize(
    "decoding, temperature, drafting",
    some(product(DECODED, [0.0, 1.0], [FEW, tuple(methods())]), [(DECODED[0], 0.0, FEW), (DECODED[1], 1.0, FEW)]),
    indirect=["decoding"],
    scope="module",
)
def test_every_method_equals_ar(decoding, name, temperature, drafting):
    sampling = SamplingParams(temperature, seed=3, constraint=GRAMMARS[name], repetition_penalty=1.1)
    prompt = list(range(10, 30))
    expected = decoding.generate(prompt, 50, "ar", sampling)
    for method in drafting:
        out = decoding.generate(prompt, 50, method, sampling)
        assert (out.token_ids, out.text) == (expected.token_ids, expected.text), method
    outs = decoding.generate_batch([prompt, prompt[:9]], 50, "auto", [sampling, None])
    assert outs[0].token_ids == expected.token_ids
    assert outs[1].token_ids == decoding.generate(prompt[:9], 50, "ar").token_ids


def test_without_end_tokens_a_text_ends_with_its_grammar(decoding):
    sampling = SamplingParams(seed=3, constraint=constraints.choice(["yes", "no"]))
    out = decoding.generate(list(range(10, 30)), 50, "auto", sampling, ignore_eos=True)
    assert out.text.strip() in ("yes", "no") and out.finish_reason == "stop"
    assert decoding.tokenizer.eos_token_id not in out.token_ids


def test_an_answer_that_goes_on(decoding):
    """The beginning of an answer in the prompt is what the constraint begins with."""
    begin = tokens_of('{"name": "pi', GRAMMARS["schema"], decoding.tokenizer)
    sampling = SamplingParams(seed=3, constraint=GRAMMARS["schema"], continued_tokens=len(begin))
    out = decoding.generate([12, 13, *begin], 90, "auto", sampling)
    assert out.token_ids == decoding.generate([12, 13, *begin], 90, "ar", sampling).token_ids
    with pytest.raises(ValueError, match="may not follow"):
        decoding.generate(
            [12, 13, *begin[1:]], 5, "ar", SamplingParams(constraint=GRAMMARS["schema"], continued_tokens=9)
        )


DEEP = '{"items": ' * 400 + "{}" + "}" * 400
FAULTS = {
    "a type that is none": (lambda: constraints.json_schema({"type": "objekt"}), "Invalid type: objekt"),
    "an unknown keyword": (lambda: constraints.json_schema({"uniqueItems": True, "type": "array"}), "uniqueItems"),
    "what cannot be met": (lambda: constraints.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "a missing reference": (lambda: constraints.json_schema({"$ref": "#/nowhere"}), "/nowhere"),
    "no JSON": (lambda: constraints.json_schema("{nope"), "not JSON"),
    "no schema": (lambda: constraints.json_schema(3), "a JSON schema is an object"),
    "NaN": (lambda: constraints.json_schema({"minimum": float("nan")}), "not JSON"),
    "too deep": (lambda: constraints.json_schema(DEEP), "recursion"),
    "an exploding pattern": (lambda: constraints.regex("((((a{1000}){1000}){1000}){1000})"), "smaller counts"),
    "one in a schema": (
        lambda: constraints.json_schema({"items": [{"pattern": "(b{999,}){1,999}"}]}),
        "smaller counts",
    ),
    "one in a grammar": (lambda: constraints.grammar('start: "(" /(b{999,}){1,999}/'), "smaller counts"),
    "an open group": (lambda: constraints.regex("(a"), "unclosed group"),
    "an unknown rule": (lambda: constraints.grammar("start: b"), "unknown name"),
    "10 MB": (lambda: constraints.grammar("start: " + '"a" | ' * 1_700_000 + '"b"'), "at most 131,072"),
    "a long schema": (lambda: constraints.json_schema({"enum": ["a" * 200_000]}), "at most 131,072"),
    "no choices": (lambda: constraints.choice([]), "at least one"),
    "an empty choice": (lambda: constraints.choice(["a", ""]), "not empty"),
    "a lone surrogate": (lambda: constraints.regex("\ud800"), "Unicode"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_kept_is_refused_at_once(name):
    make, words = FAULTS[name]
    start = time.process_time()
    with pytest.raises(ValueError, match=words):
        make()
    assert time.process_time() - start < 1


@pytest.mark.parametrize("pattern", ["(a{1000}){90}", "(.*a.{400})", "(x+x+)+y", "[a-z]{1,9999}"])
def test_patterns_that_explode_do_not_hang(decoding, pattern):
    """They are kept, or refused in words; which one is the grammar engine's to say."""
    start = time.process_time()
    try:
        decoding.generate([12, 13], 8, "auto", SamplingParams(constraint=constraints.regex(pattern)))
    except ValueError as error:
        assert "cannot" in str(error)
    assert time.process_time() - start < 5


def test_grammars_need_a_fast_tokenizer(dec, prompt):
    with pytest.raises(ValueError, match="need a tokenizer"):
        dec.generate(prompt, 5, "ar", SamplingParams(constraint=GRAMMARS["choice"]))


def test_grammars_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'tokenswift-decoder\[constraints\]'"):
        constraints.choice(["a"])


def test_equal_grammars_are_equal():
    """So that what was measured and compiled for one serves the other."""
    one, other = (constraints.json_schema(dict(PERSON)) for _ in range(2))
    assert one == other and hash(one) == hash(other) and one != GRAMMARS["schema on one line"]
