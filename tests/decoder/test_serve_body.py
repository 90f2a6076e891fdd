"""The body of a request: bad numbers, texts, names and nesting anywhere in it are found, with their place."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.serve.body import MOST_LEVELS, parse_body
from decoder.serve.errors import ApiError

NAMES = st.text("abcdefg_ \"'\n.é", min_size=1, max_size=5)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-(10**300), 10**300) | st.floats(allow_nan=False, allow_infinity=False)
GOOD = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
BAD = {
    "NaN": "finite",
    "-Infinity": "finite",
    "1e999": "finite",
    "-" + "9" * 310: "float",
    "9" * 5000: "float",
    r'"a\ud83d"': "surrogate",
    r'"\udc00\ud83d"': "surrogate",
    r'{"a\udfff": 1}': "surrogate",
    '{"a": 1, "b": 2, "a": 1}': "twice",
    "[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1): "levels",
    "[" * 200_000: "levels",
}


def refused(data):
    with pytest.raises(ApiError) as raised:
        parse_body(data)
    assert raised.value.status == 400 and "\n" not in raised.value.message and len(raised.value.message) < 300
    return raised.value


@settings(deadline=None)
@given(GOOD, st.booleans())
def test_what_is_good_is_read_as_it_is(value, escaped):
    text = json.dumps(value, ensure_ascii=escaped)
    assert parse_body(text.encode()) == value
    assert parse_body(b"\xef\xbb\xbf" + text.encode()) == value


@settings(deadline=None)
@given(st.lists(NAMES | st.integers(0, 3), max_size=4), st.sampled_from(sorted(BAD)), GOOD)
def test_what_is_bad_is_found_wherever_it_is(path, bad, beside):
    text, place = bad, ""
    for step in path:
        plain = isinstance(step, str) and step.isascii() and step.isidentifier()
        place += "." * bool(place and plain) + (step if plain else f"[{json.dumps(step)}]")
    for step in reversed(path):
        if isinstance(step, int):
            text = f"[{'1, ' * step}{text}, {json.dumps(beside)}]"
        else:
            text = f'{{"other": {json.dumps(beside)}, {json.dumps(step)}: {text}}}'
    error = refused(text.encode())
    assert BAD[bad] in error.message
    if bad != "[" * 200_000:
        # Cut where it is long; a bad value of several levels has a place within itself.
        assert error.message.startswith(place[:80] or ("the body", "[", "a "))
        if path and place.startswith(str(path[0])):
            assert error.param == path[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "line 1, column 1"),
        (b'{"a": 1,\n "b": }', "line 2, column 7"),
        (b'"\xff"', "byte 2"),
        ('{"a": "é"}'.encode("utf-16"), "UTF-8"),
        (b'{"a": 1} 2', "column 10"),
        (b'"a\nb"', "column 3"),
        (b"'a'", "column 1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_not_json_is_told_with_its_place(data, words):
    message = refused(data).message
    assert words in message and "not JSON" in message
