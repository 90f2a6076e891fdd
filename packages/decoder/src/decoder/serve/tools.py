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
    FUNCTION,
    NAMED,
    TOOL,
    TOOL_CALL,
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
    """

    offered: list[dict[str, Any]]
    schemas: dict[str, Any]
    required: bool
    parallel: bool


def tools_of(values: Mapping[str, Any]) -> Tools | None:
    """The tools that a request's fields offer, if any may be called. Raises ApiError 400, with the place."""
    choice = values["tool_choice"]
    if not values["tools"]:
        if choice not in (None, "none", "auto"):
            refuse("tool_choice", "needs tools: send the functions, too")
        return None
    offered, schemas = list[dict[str, Any]](), dict[str, Any]()
    for index, tool in enumerate(values["tools"]):
        function = _function(tool, f"tools[{index}]")
        if function["name"] in schemas:
            refuse(f"tools[{index}].function.name", "is that of an earlier tool: give each its own")
        schemas[function["name"]] = function.get("parameters", {"type": "object"})
        offered.append({"type": "function", "function": function})
    if choice == "none":
        return None
    chosen, required = _chosen(choice, schemas)
    one = isinstance(choice, dict) and choice.get("type") != "allowed_tools"
    return Tools(offered, {name: schemas[name] for name in chosen}, required, values["parallel_tool_calls"] and not one)


def _function(tool: Any, place: str) -> dict[str, Any]:
    require(OBJECT, tool, place)
    values = read(tool, TOOL, place)
    require(TEXT, values["type"], f"{place}.type")
    require(OBJECT, values["function"], f"{place}.function")
    place += ".function"
    function = read(values["function"], FUNCTION, place)
    require(TEXT, function["name"], f"{place}.name")
    if not re.fullmatch(NAME, function["name"]):
        refuse(f"{place}.name", "must be 1 to 64 letters, digits, dots, underscores and hyphens")
    return {name: value for name, value in function.items() if value is not None}


def _chosen(choice: Any, schemas: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The names of the functions that may be called, and whether one must be."""
    if not isinstance(choice, dict):
        return list(schemas), choice == "required"
    values = read(choice, CHOICE_OF_TOOL, "tool_choice")
    require(TEXT, values["type"], "tool_choice.type")
    if values["type"] == "function":
        return [_named(choice, "tool_choice", schemas)], True
    require(OBJECT, values["allowed_tools"], "tool_choice.allowed_tools")
    allowed = read(values["allowed_tools"], ALLOWED_TOOLS, "tool_choice.allowed_tools")
    if not allowed["tools"]:
        refuse("tool_choice.allowed_tools.tools", "must name at least one function")
    places = (f"tool_choice.allowed_tools.tools[{index}]" for index in range(len(allowed["tools"])))
    return [_named(one, place, schemas) for one, place in zip(allowed["tools"], places, strict=True)], (
        allowed["mode"] == "required"
    )


def _named(value: Any, place: str, schemas: Mapping[str, Any]) -> str:
    require(OBJECT, value, place)
    function = read(value, CHOICE_OF_TOOL, place)["function"]
    require(OBJECT, function, f"{place}.function")
    name = read(function, NAMED, f"{place}.function")["name"]
    require(TEXT, name, f"{place}.function.name")
    if name not in schemas:
        refuse(f"{place}.function.name", f"is none of the tools: use one of {', '.join(schemas)[:200]}")
    return name


def calls_of(value: list[Any], place: str) -> list[dict[str, Any]]:
    """The calls of an earlier message as chat templates take them, their arguments as objects."""
    return [_call(one, f"{place}[{index}]") for index, one in enumerate(value)]


def _call(value: Any, place: str) -> dict[str, Any]:
    require(OBJECT, value, place)
    values = read(value, TOOL_CALL, place)
    require(OBJECT, values["function"], f"{place}.function")
    called = read(values["function"], CALLED, f"{place}.function")
    require(TEXT, called["name"], f"{place}.function.name")
    place += ".function.arguments"
    try:
        arguments = parse_json(called["arguments"] or "{}", place)
        check(arguments, place)
    except ValueError as error:
        raise ApiError(400, str(error), field_of(place)) from None
    if not isinstance(arguments, dict):
        refuse(place, "must be the text of a JSON object")
    made = {"type": "function", "function": {"name": called["name"], "arguments": arguments}}
    return made if values["id"] is None else {"id": values["id"], **made}
