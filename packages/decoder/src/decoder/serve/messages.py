"""The messages of a chat as its template takes them, from those of OpenAI's protocol, and from items of responses."""

from collections.abc import Mapping, Sequence
from typing import Any

from decoder.serve.fields import CALLED, ITEMS, MESSAGE, PART, PART_OF_ITEM, Fields, read, refuse, require
from decoder.serve.kinds import LIST, MESSAGES, OBJECT, TEXT
from decoder.serve.tools import call_of, called

Message = dict[str, Any]


def messages_of(value: Any) -> list[Message]:
    """The messages of a chat. Raises ApiError 400."""
    require(MESSAGES, value, "messages")
    return [_message(one, f"messages[{index}]") for index, one in enumerate(value)]


def _message(value: Any, place: str) -> Message:
    require(OBJECT, value, place)
    values = read(value, MESSAGE, place)
    calls = [call_of(one, f"{place}.tool_calls[{index}]") for index, one in enumerate(values["tool_calls"] or [])]
    if (old := values.pop("function_call")) is not None:
        at = f"{place}.function_call"
        calls.append(called(read(old, CALLED, at), None, at))
    values["tool_calls"] = calls or None
    if (refusal := values.pop("refusal")) is not None and values["content"] is None:
        values["content"] = refusal
    if values["content"] is None and calls:
        values["content"] = ""
    values["content"] = _text(values["content"], f"{place}.content", PART)
    reasoning = values.pop("reasoning")
    values["reasoning_content"] = values["reasoning_content"] or reasoning
    require(TEXT, values["role"], f"{place}.role")
    if values["role"] == "function":
        # What results of tools were before.
        values["role"] = "tool"
    elif values["role"] == "tool":
        require(TEXT, values["tool_call_id"], f"{place}.tool_call_id")
    return {name: each for name, each in values.items() if each is not None}


def _text(content: Any, place: str, fields: Fields) -> str:
    """The text of a content, which may be a list of parts."""
    if not isinstance(content, list):
        require(TEXT, content, place)
        return content
    texts = []
    for index, part in enumerate(content):
        at = f"{place}[{index}]"
        require(OBJECT, part, at)
        values = read(part, fields, at)
        require(TEXT, values["type"], f"{at}.type")
        name = "refusal" if values["type"] == "refusal" else "text"
        require(TEXT, values[name], f"{at}.{name}")
        texts.append(values[name])
    return "".join(texts)


def messages_of_items(items: Sequence[Any], earlier: int = 0) -> list[Message]:
    """The messages of a conversation of `/v1/responses`; the places in errors count from the item ``earlier`` on.

    Raises:
        ApiError: 400, with the place of what no item can have.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        place = f"input[{index - earlier}]"
        require(OBJECT, item, place)
        kind = item.get("type") or "message"
        fields = ITEMS.get(kind) if isinstance(kind, str) else None
        if fields is None:
            refuse(f"{place}.type", f"must be one of {', '.join(ITEMS)}: the model reads text, and calls functions")
            continue
        _add(messages, kind, read(item, fields, place), place)
    return messages


def _add(messages: list[Message], kind: str, values: Mapping[str, Any], place: str) -> None:
    """Add what an item says. Reasoning, a text and calls, in this order, are one message of the assistant."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        require(TEXT, values["role"], f"{place}.role")
        text = _text(values["content"], f"{place}.content", PART_OF_ITEM)
        if last is None or values["role"] != "assistant" or last["content"] or "tool_calls" in last:
            messages.append({"role": values["role"], "content": text})
        else:
            last["content"] = text
    elif kind == "function_call_output":
        require(TEXT, values["call_id"], f"{place}.call_id")
        text = _text(values["output"], f"{place}.output", PART_OF_ITEM)
        messages.append({"role": "tool", "tool_call_id": values["call_id"], "content": text})
    elif kind == "function_call":
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        require(TEXT, values["call_id"], f"{place}.call_id")
        last.setdefault("tool_calls", []).append(called(values, values["call_id"], place))
    else:
        for name in ("content", "summary"):
            require(LIST, values[name], f"{place}.{name}")
        parts = "content" if values["content"] else "summary"
        text = _text(values[parts], f"{place}.{parts}", PART_OF_ITEM)
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})
