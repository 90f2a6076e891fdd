"""Numbers that no float holds and text that no UTF-8 holds: found wherever they stand, and told in a short sentence."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.checks import check, decoded, faults, parse_json, shown
from decoder.heads_files import read_json
from decoder.yaml_text import parse_yaml

from ..tiny import byte_tokenizer
from .conftest import tiny_llama

surrogates = st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF)
words = st.text(max_size=5)
broken_texts = st.builds("{}{}{}".format, words, surrogates, words)
huge = st.builds(lambda digits, sign: sign * 10**digits, st.integers(309, 5000), st.sampled_from([1, -1]))
sound = st.none() | st.booleans() | st.integers(-(10**300), 10**300) | st.floats() | words
nested = st.recursive(sound, lambda each: st.lists(each, max_size=3) | st.dictionaries(words, each, max_size=3))


@given(nested)
def test_values_that_can_be_held_pass(value):
    assert list(faults(value)) == []
    check(value, "the body")


@given(st.data())
def test_a_value_that_cannot_be_held_is_found_wherever_it_stands(data):
    value = data.draw(broken_texts | huge)
    place = ""
    for kind in reversed(data.draw(st.lists(st.sampled_from(["list", "key", "tuple"]), max_size=4))):
        name = data.draw(st.text("abcXYZ_", min_size=1)) if kind == "key" else "[1]"
        value = {"before": 0, name: value} if kind == "key" else ["before", value]
        value = tuple(value) if kind == "tuple" else value
        place = name + ("." + place if place and not place.startswith("[") else place)
    [(found, told)] = faults(value)
    assert found == place
    assert told.startswith(("is not valid Unicode: character ", "must be a number that a float holds, not "))
    with pytest.raises(ValueError) as error:
        check(value, "the body")
    told = str(error.value)
    assert len(told) < 200 and told.encode() and "the body" in told


@given(broken_texts)
def test_keys_are_texts_too(key):
    [(place, told)] = faults({"a": [{key: 1}]})
    assert place == "a[0]" and told.startswith("has a key that is not valid Unicode")


def test_lists_deeper_than_python_calls_are_searched():
    value = "\udfff"
    for _ in range(5000):
        value = [value]
    [(place, _)] = faults(value)
    assert place == "[0]" * 5000
    with pytest.raises(ValueError, match=r"line 3 .*too deep"):
        parse_json("[" * 10**5 + "]" * 10**5, "line 3")


def test_a_value_within_itself_or_in_many_places_is_searched_once():
    """As YAML makes them from aliases: lists of one list ten times, thirty levels deep, and `a: &a [*a]`."""
    value = ["\udfff"]
    for _ in range(30):
        value = [value] * 10
    [(place, _)] = faults(value)
    assert place == "[0]" * 31
    value = {"b": [1, 2]}
    value["b"].append({"c": value})
    assert list(faults({"a": value, "d": value})) == [("a.b[2].c", "holds itself")]


@given(nested | huge | broken_texts | st.lists(huge, min_size=1))
def test_any_value_can_be_shown(value):
    assert 0 < len(shown(value)) < 100 and shown(value).encode()


@given(nested, st.sampled_from(["", "\ufeff"]))
def test_json_is_read_with_or_without_a_byte_order_mark(value, mark):
    text = json.dumps(value)
    for given_as in (mark + text, (mark + text).encode()):
        assert repr(parse_json(given_as, "it")) == repr(json.loads(text))


@given(st.text())
def test_a_text_is_read_with_or_without_a_byte_order_mark(text):
    if text.count("\0") <= len(text) / 4:
        assert decoded(b"\xef\xbb\xbf" + text.encode(), "it") == text
        assert decoded(text.encode(), "it") == text.removeprefix("\ufeff")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "latin-1", "cp1252"])
@given(text=st.text("abc é", min_size=1))
def test_a_text_in_another_encoding_is_refused(encoding, text):
    data = f"{text}Der Äther".encode(encoding)
    with pytest.raises(ValueError, match=r"^line 3 of it is not UTF-8 text .*: save it as UTF-8$") as error:
        decoded(data, "line 3 of it")
    assert len(str(error.value)) < 120


@given(nested, st.lists(st.sampled_from("abc") | st.integers(0, 2), max_size=4))
def test_a_name_that_is_twice_is_refused_wherever_it_stands(value, path):
    text, place = f'{{"x": {json.dumps(value)}, "yz": 1, "x": 2}}', ""
    for step in path:
        place += f"[{step}]" if isinstance(step, int) else "." * bool(place) + step
    for step in reversed(path):
        text = f"[{'1, ' * step}{text}, 2]" if isinstance(step, int) else f'{{"z": 1, "{step}": {text}}}'
    told = f"{place}.x".lstrip(".") + " in line 7 of it is there twice: leave one out"
    with pytest.raises(ValueError) as error:
        parse_json(text, "line 7 of it")
    assert str(error.value) == told
    with pytest.raises(ValueError, match=r"^'x' in line 1 of it is there twice: leave one out$"):
        parse_yaml(text, "it")


def test_what_a_yaml_mapping_merges_in_it_may_write_anew():
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: [*b, *a], y: 4}\nd: {x: 1, y: {x: 1}}"
    merged = {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 3, "y": 4}, "d": {"x": 1, "y": {"x": 1}}}
    assert parse_yaml(text, "it") == merged


@pytest.mark.parametrize("text", ["{", '{"a": 1} 2', b"\xff\xfe\xfd", "1" * 5000, "\ufeff", ""], ids=range(6))
def test_what_is_no_json_is_told_by_its_name(text):
    with pytest.raises(ValueError, match=r"^line 7 of it is not JSON: ") as error:
        parse_json(text, "line 7 of it")
    assert len(str(error.value)) < 200


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_number_of_the_records_is_refused_by_name_or_can_be_used(data):
    """Whatever a record takes, a generation takes; what it does not take, it says so in a sentence with the name."""
    record = data.draw(st.sampled_from([SamplingParams(), TokenSwiftOptions()]))
    names = [field.name for field in fields(record) if type(field.default) in (int, float) or field.default is None]
    name = data.draw(st.sampled_from(names))
    extremes = st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -1, 0, float("inf"), float("nan"), 1e-320, 5e-7])
    value = data.draw(huge | extremes | st.floats() | st.integers() | broken_texts)
    try:
        made = replace(record, **{name: value})
    except ValueError as error:
        assert str(error).startswith(f"{name} must be ") and len(str(error)) < 250
        return
    if name in ("sink", "budget", "draft_budget"):
        return  # memory
    dec = _decoder()
    settings_ = {"sampling": made} if isinstance(made, SamplingParams) else {"options": made}
    assert len(dec.generate([1, 2, 3], 3, "tokenswift" if dec.heads else "magicdec", **settings_).token_ids) == 3


def _decoder(made=[]):  # noqa: B006 (made once)
    if not made:
        made.append(Decoder(tiny_llama(), byte_tokenizer()))
    return made[0]


@settings(max_examples=50, deadline=None)
@given(broken_texts, st.sampled_from(["prompt", "role", "content", "stop", "extra"]))
def test_texts_of_a_generation_are_valid_unicode(text, where):
    dec = _decoder()
    dec.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    message = {"role": "user", "content": "a", **({where: text} if where in ("role", "content", "extra") else {})}
    arguments = {"prompt": text} if where == "prompt" else {"prompt": [1], "stop": ["a", text]}
    arguments = arguments if where in ("prompt", "stop") else {"prompt": [{"role": "user", "content": "b"}, message]}
    with pytest.raises(ValueError, match=r"is not valid Unicode: character \d+ is the lone surrogate") as error:
        dec.stream(max_new_tokens=2, **arguments)
    assert str(error.value).encode()
    assert where in ("prompt", "stop") or str(error.value).startswith(f"messages[1].{where} in the prompt")


@given(st.sampled_from(["norm_eps", "num_heads", "any"]), huge | broken_texts)
def test_a_checkpoints_configuration_is_checked(tmp_path_factory, key, value):
    path = tmp_path_factory.mktemp("heads") / "config.json"
    if isinstance(value, int) and abs(value) > 10**4000:
        value = 10**4000
    path.write_text(json.dumps({key: value}))
    with pytest.raises(ValueError, match=f"^{key} in .*config.json (is not valid|must be)"):
        read_json(path)
