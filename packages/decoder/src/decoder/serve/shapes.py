"""What a request's answer must be: the fields of several servers for schemas, patterns, grammars and choices."""

from collections.abc import Callable, Mapping
from typing import Any

from decoder import constraints
from decoder.constraints import Grammar
from decoder.serve.body import field_of
from decoder.serve.errors import ApiError
from decoder.serve.fields import JSON_SCHEMA, RESPONSE_FORMAT, STRUCTURED_OUTPUTS, read, refuse

_SCHEMAS = ("guided_json", "json_schema")
_PATTERNS = ("guided_regex", "regex")
_GRAMMARS = ("guided_grammar", "grammar", "ebnf")
_ANY_OBJECT = {"type": "object"}


def constraint_of(values: Mapping[str, Any], format_place: str) -> tuple[str | None, Grammar | None]:
    """The constraint that a request's fields ask for, with the place that asks; None where there is none.

    ``format_place`` is that of ``response_format`` in the body.

    Raises:
        ApiError: 400, with the place: it cannot be kept, or several fields ask for one.
    """
    made = _of_format(values["response_format"], format_place) | _of_structured_outputs(values["structured_outputs"])
    made |= {name: _schema(values[name]) for name in _SCHEMAS if values[name] is not None}
    made |= {name: _made(constraints.regex, values[name]) for name in _PATTERNS if values[name]}
    made |= {name: _made(constraints.grammar, values[name]) for name in _GRAMMARS if values[name]}
    if values["guided_choice"] is not None:
        made["guided_choice"] = _choice(values["guided_choice"])
    if len(made) > 1:
        first, other, *_ = made
        refuse(other, f"says what the answer must be, as does {first}: send one of them")
    for place, make in made.items():
        try:
            return place, make()
        except ValueError as error:
            raise ApiError(400, f"{place}: {error}", field_of(place)) from None
    return None, None


Made = dict[str, Callable[[], Grammar]]
"""How to make a constraint, by the place in the body that asks for it."""


def _of_format(value: dict[str, Any] | None, place: str) -> Made:
    if value is None:
        return {}
    values = read(value, RESPONSE_FORMAT, place)
    if values["type"] is None:
        refuse(f"{place}.type", "is needed: send text, json_object or json_schema")
    if values["type"] == "text":
        return {}
    if values["json_schema"] is not None and values["type"] == "json_schema":
        place += ".json_schema"
        values = read(values["json_schema"], JSON_SCHEMA, place)
    elif values["type"] == "json_object" and values["schema"] is None:
        return {place: _schema(_ANY_OBJECT)}
    if values["schema"] is None:
        refuse(f"{place}.schema", "is needed: send a JSON schema")
    return {f"{place}.schema": _schema(values["schema"])}


def _of_structured_outputs(value: dict[str, Any] | None) -> Made:
    if value is None:
        return {}
    values = read(value, STRUCTURED_OUTPUTS, "structured_outputs")
    spaces, made = not values["disable_any_whitespace"], Made()
    if values["json"] is not None:
        made["json"] = _schema(values["json"], spaces)
    if values["json_object"]:
        made["json_object"] = _schema(_ANY_OBJECT, spaces)
    if values["regex"] is not None:
        made["regex"] = _made(constraints.regex, values["regex"])
    if values["grammar"] is not None:
        made["grammar"] = _made(constraints.grammar, values["grammar"])
    if values["choice"] is not None:
        made["choice"] = _choice(values["choice"])
    return {f"structured_outputs.{name}": make for name, make in made.items()}


def _made(kind: Callable[[str], Grammar], source: str) -> Callable[[], Grammar]:
    return lambda: kind(source)


def _schema(schema: Any, any_whitespace: bool = True) -> Callable[[], Grammar]:
    return lambda: constraints.json_schema(schema, any_whitespace)


def _choice(choices: str | list[str]) -> Callable[[], Grammar]:
    return lambda: constraints.choice([choices] if isinstance(choices, str) else choices)
