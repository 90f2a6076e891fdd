"""The tools that a request offers, which of them an answer may or must call, and calls in earlier messages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decoder.checks import check, parse_json
from decoder.serve.body import field_of
from decoder.serve.errors import ApiError
from decoder.serve.fields import (
    ALLOWED_TOOLS,
    CALLED,
    CHOICE_OF_TOOL,
    FLAT_CHOICE,
    FLAT_TOOL,
    FUNCTION,
    NAMED,
    OLD_FUNCTION,
    TOOL,
    TOOL_CALL,
    Fields,
    read,
    refuse,
    require,
)
from decoder.serve.kinds import OBJECT, TEXT
from decoder.serve.tool_forms import NAME


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        offered: all, as the chat template takes them.
        schemas: of the arguments of each function that may be called, by its name.
        required: whether the answer is a call in any case.
        parallel: whether it may be several.
        places: where in the body the schema of each of these functions is, by its name.
        old: whether they came as OpenAI's ``functions``, and a call goes back as its ``function_call``.
    """

    offered: list[dict[str, Any]]
    schemas: dict[str, Any]
    required: bool
    parallel: bool
    places: dict[str, str]
    old: bool = False

    @property
    def field(self) -> str:
        """The field of the body that has them."""
        return "functions" if self.old else "tools"


def tools_of(values: Mapping[str, Any], flat: bool = False) -> Tools | None:
    """The tools that a request's fields offer, if any may be called. Raises ApiError 400, with the place.

    Those of `/v1/responses` are ``flat``: they have their function's fields themselves.
    """
    old = bool(values.get("functions"))
    field, choosing = ("functions", "function_call") if old else ("tools", "tool_choice")
    choice = values[choosing]
    for other in ("tools", "tool_choice") if old else ("function_call",):
        if values.get(other) not in (None, "none", "auto", []):
            refuse(other, "goes with tools alone, and function_call with functions: send one of the two forms")
    if not values[field]:
        if choice not in (None, "none", "auto"):
            refuse("tool_choice", "needs tools: send the functions, too")
        return None
    offered, schemas, places = list[dict[str, Any]](), dict[str, Any](), dict[str, str]()
    for index, tool in enumerate(values[field]):
        place = f"{field}[{index}]"
        function, place = _function(tool, place, OLD_FUNCTION if old else FLAT_TOOL if flat else TOOL)
        if function["name"] in schemas:
            refuse(f"{place}.name", "is that of an earlier tool: give each its own")
        schemas[function["name"]] = _arguments(function.get("parameters"))
        places[function["name"]] = f"{place}.parameters"
        offered.append({"type": "function", "function": function})
    if choice == "none":
        return None
    chosen, required = _chosen(choice, schemas, choosing, flat or old)
    one = isinstance(choice, dict) and choice.get("type") != "allowed_tools"
    parallel = values["parallel_tool_calls"] and not one and not old
    return Tools(offered, {name: schemas[name] for name in chosen}, required, parallel, places, old)


def _function(tool: Any, place: str, form: Fields) -> tuple[dict[str, Any], str]:
    """A function with its place."""
    require(OBJECT, tool, place)
    values = read(tool, form, place)
    if "type" in form:
        require(TEXT, values.pop("type"), f"{place}.type")
    if form is TOOL:
        require(OBJECT, values["function"], f"{place}.function")
        place += ".function"
        values = read(values["function"], FUNCTION, place)
    require(TEXT, values["name"], f"{place}.name")
    if not re.fullmatch(NAME, values["name"]):
        refuse(f"{place}.name", "must be 1 to 64 letters, digits, dots, underscores and hyphens")
    return {name: value for name, value in values.items() if value is not None}, place


def _arguments(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object; without parameters one that has nothing in it."""
    return {"type": "object", **(parameters or {"properties": {}, "additionalProperties": False})}


def _chosen(choice: Any, schemas: Mapping[str, Any], place: str, flat: bool) -> tuple[list[str], bool]:
    """The names of the functions that may be called, and whether one must be."""
    if not isinstance(choice, dict):
        return list(schemas), choice == "required"
    if place == "function_call":
        return [_known(read(choice, NAMED, place)["name"], f"{place}.name", schemas)], True
    values = read(choice, FLAT_CHOICE if flat else CHOICE_OF_TOOL, place)
    require(TEXT, values["type"], f"{place}.type")
    if values["type"] == "function":
        return [_named(choice, place, schemas, flat)], True
    allowed = values
    if not flat:
        place += ".allowed_tools"
        require(OBJECT, values["allowed_tools"], place)
        allowed = read(values["allowed_tools"], ALLOWED_TOOLS, place)
    if not allowed["tools"]:
        refuse(f"{place}.tools", "must name at least one function")
    names = [_named(one, f"{place}.tools[{index}]", schemas, flat) for index, one in enumerate(allowed["tools"])]
    return names, allowed["mode"] == "required"


def _named(value: Any, place: str, schemas: Mapping[str, Any], flat: bool) -> str:
    require(OBJECT, value, place)
    if flat:
        return _known(read(value, FLAT_CHOICE, place)["name"], f"{place}.name", schemas)
    function = read(value, CHOICE_OF_TOOL, place)["function"]
    require(OBJECT, function, f"{place}.function")
    return _known(read(function, NAMED, f"{place}.function")["name"], f"{place}.function.name", schemas)


def _known(name: Any, place: str, schemas: Mapping[str, Any]) -> str:
    require(TEXT, name, place)
    if name not in schemas:
        refuse(place, f"is none of the tools: use one of {', '.join(schemas)[:200]}")
    return name


def call_of(value: Any, place: str) -> dict[str, Any]:
    """A call of an earlier message as chat templates take it, its arguments as an object. Raises ApiError 400."""
    require(OBJECT, value, place)
    values = read(value, TOOL_CALL, place)
    place += ".function"
    require(OBJECT, values["function"], place)
    return called(read(values["function"], CALLED, place), values["id"], place)


def called(values: Mapping[str, Any], identity: str | None, place: str) -> dict[str, Any]:
    """The same from the name and the arguments of a function."""
    require(TEXT, values["name"], f"{place}.name")
    place += ".arguments"
    try:
        arguments = parse_json(values["arguments"] or "{}", place)
        check(arguments, place)
    except ValueError as error:
        raise ApiError(400, str(error), field_of(place)) from None
    if not isinstance(arguments, dict):
        refuse(place, "must be the text of a JSON object")
    made = {"type": "function", "function": {"name": values["name"], "arguments": arguments}}
    return made if identity is None else {"id": identity, **made}
