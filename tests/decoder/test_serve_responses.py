"""`/v1/responses`: the texts of chats, as items and as events that OpenAI's client reads."""

import json
from itertools import count
from typing import Literal

import jsonschema
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from decoder.serve import kept
from decoder.serve.errors import ApiError
from decoder.serve.fields import ITEMS, REASONING, RESPONSE, Ignored
from decoder.serve.kept import Kept
from decoder.serve.requests import parse, parse_response

from .serving import WEATHER, calling_decoder, served

pytest.importorskip("llguidance")

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "description": "Of a day", "parameters": WEATHER, "strict": True}
NESTED = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}
CALL_WEATHER = {"type": "function", "name": "weather"}
THINKS = {"chat_template_kwargs": {"forced_thinking": True}, "logit_bias": {"259": 5}}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
NO_SPACES = {"logit_bias": {"32": -100, "201": -100}}


@pytest.fixture(scope="module")
def server():
    with served(calling_decoder(), max_tokens=600) as running:
        yield running


def events_of(server, body):
    """The events of a stream, each of which is one that OpenAI's client documents."""
    checked, events = TypeAdapter(ResponseStreamEvent), []
    for block in server.post({**body, "stream": True}, PATH).text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(events)
        checked.validate_python(event)
        events.append(event)
    return events


def settled(response):
    """A response without what differs each time, up to the last digits of log-probabilities."""
    ids = count()
    text = json.dumps({**response, "id": None, "created_at": None, "completed_at": None, "usage": None})
    for item in response["output"]:
        text = text.replace(item["id"], f"id{next(ids)}").replace(item.get("call_id", "-" * 9), f"call{next(ids)}")
    return rounded(text)


def rounded(text):
    return json.loads(text, parse_float=lambda number: round(float(number), 9))


ASKED = {
    "text": dict(input="Call me", instructions="Be brief."),
    "cut": dict(input="Call me", max_output_tokens=7, top_logprobs=2, temperature=0.8, top_p=0.9),
    "items": dict(
        input=[
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Call me"}]},
        ],
        include=["message.output_text.logprobs"],
        temperature=0,
    ),
    "shape": dict(input="Where?", text={"format": {"type": "json_schema", "name": "where", "schema": WEATHER}}),
    "any object": dict(input="Where?", text={"format": {"type": "json_object"}}, **NO_SPACES),
    "thought": dict(input="Call me", max_output_tokens=200, **THINKS),
    "call": dict(input="Where?", tools=[TOOL], tool_choice="required", **QUIET),
    "thought and call": dict(
        input="Where?", tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, **THINKS
    ),
    "allowed": dict(
        input="Where?",
        tools=[TOOL],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [CALL_WEATHER]},
        parallel_tool_calls=False,
    ),
}


def as_chat(body):
    """The same request of a chat."""
    asked = {name: value for name, value in body.items() if name not in ("input", "instructions", "text", "include")}
    given = [{"role": "user", "content": body["input"]}] if isinstance(body["input"], str) else body["input"]
    messages = [{"role": one["role"], "content": one["content"]} for one in given]
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = message["content"][0]["text"]
    if "instructions" in body:
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    if "text" in body:
        form = body["text"]["format"]
        nested = {"json_schema": {"schema": WEATHER}} if form["type"] == "json_schema" else {}
        asked["response_format"] = {"type": form["type"], **nested}
    if "tools" in body:
        asked["tools"] = [NESTED]
    if isinstance(choice := body.get("tool_choice"), dict):
        asked["tool_choice"] = (
            {"type": "function", "function": {"name": "weather"}} if choice["type"] == "function" else "required"
        )
    if "max_output_tokens" in body:
        asked["max_tokens"] = asked.pop("max_output_tokens")
    if "top_logprobs" in body or "include" in body:
        asked["logprobs"] = True
    return {**asked, "messages": messages}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_chats_and_streams_end_with_the_whole(server, name):
    calling = "call" in name or name == "allowed"  # which is to be whole
    body = {"max_output_tokens": 500 if calling else 100, "seed": 3, **ASKED[name]}
    whole = server.post(body, PATH).json()
    chat = server.post(as_chat(body), "/v1/chat/completions").json()
    Response.model_validate(whole)
    message = chat["choices"][0]["message"]
    texts = {"reasoning": "", "message": ""}
    calls = []
    for item in whole["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
            jsonschema.validate(json.loads(item["arguments"]), WEATHER)
        else:
            texts[item["type"]] += item["content"][0]["text"]
    assert texts["message"] == (message["content"] or "")
    assert texts["reasoning"] == message.get("reasoning_content", "")
    assert calls == [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
    assert calling == bool(calls)
    # A thought may have no text: a few bytes that are no character yet.
    assert not texts["reasoning"] or whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    cut = chat["choices"][0]["finish_reason"] == "length"
    assert whole["status"] == ("incomplete" if cut else "completed")
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    for ours, theirs in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
        assert whole["usage"][ours] == chat["usage"][theirs]
    if (of_chat := chat["choices"][0]["logprobs"]) is not None:
        told = whole["output"][0]["content"][0]["logprobs"]
        assert rounded(json.dumps(told)) == rounded(json.dumps(of_chat["content"]))
    events = events_of(server, body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert settled(events[-1]["response"]) == settled(whole)
    deltas = {"reasoning": "", "message": "", "function_call": ""}
    items = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[items[event["output_index"]]] += event["delta"]
    assert deltas == {**texts, "function_call": "".join(arguments for _, arguments in calls)}


def test_reasoning_can_be_left_out(server):
    body = {"seed": 3, "max_output_tokens": 500, **ASKED["thought and call"]}
    items = server.post({**body, "include_reasoning": False}, PATH).json()["output"]
    assert [item["type"] for item in items] == ["function_call"]


def test_the_client_streams_parses_and_keeps(server):
    class Where(BaseModel):
        city: Literal["Paris", "Rome"]
        days: Literal[1, 2]

    client, asked = server.openai.responses, dict(model="tiny", max_output_tokens=400)
    got = client.parse(input="Where?", text_format=Where, extra_body={"seed": 1, **NO_SPACES}, **asked)
    assert got.output_parsed.city in ("Paris", "Rome")
    with client.stream(input="Where?", tools=[TOOL], tool_choice="required", extra_body={"seed": 1}, **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and final.output[-1].parsed_arguments["days"]
    assert client.retrieve(final.id).output[-1].arguments == final.output[-1].arguments
    assert [item.content for item in client.input_items.list(final.id).data] == ["Where?"]
    client.delete(final.id)
    for path in (f"{PATH}/{final.id}", f"{PATH}/{final.id}/input_items"):
        assert server.http.get(path).status_code == 404
    unkept = client.create(input="Call me", store=False, **asked)
    assert server.http.get(f"{PATH}/{unkept.id}").status_code == 404


def test_a_request_goes_on_behind_an_answer_as_with_all_items(server):
    """By its id, by references to its items, with its items, and as a chat: the same text each time."""
    asked = dict(tools=[TOOL], max_output_tokens=500, seed=3, **QUIET)
    first = server.post({**asked, "input": "Where?", "tool_choice": "required"}, PATH).json()
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": [{"type": "input_text", "text": "Sun"}]}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    before = [{"role": "user", "content": "Where?"}]
    last = {**asked, "max_output_tokens": 30, "tool_choice": "auto"}
    behind = server.post({**last, "previous_response_id": first["id"], "input": results}, PATH).json()
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    calls = [
        {"id": one["call_id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
        for one in first["output"]
    ]
    told = [{"role": "tool", "tool_call_id": one["call_id"], "content": "Sun"} for one in results]
    messages = [*before, {"role": "assistant", "content": None, "tool_calls": calls}, *told]
    chat = {**last, "tools": [NESTED], "max_tokens": 30, "messages": messages}
    del chat["max_output_tokens"]
    expected = server.post(chat, "/v1/chat/completions").json()
    for items in ([*before, *first["output"], *results], [*before, *references, *results]):
        again = server.post({**last, "input": items}, PATH).json()
        assert settled(again)["output"] == settled(behind)["output"]
    assert behind["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert behind["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]


def test_the_oldest_turns_are_left_out_where_all_are_too_many(server):
    """As few as leave room for the answer; never what stands in front of all turns."""
    positions = server.service.dec.model.config.max_position_embeddings
    turns = []
    for number in range(9):
        turns += [{"role": "user", "content": f"{number}" * (positions // 7)}, {"role": "assistant", "content": "So"}]
    turns[-1] = {"role": "user", "content": "And now?"}
    asked = dict(max_output_tokens=positions // 6, seed=1)
    asked["max_output_tokens"] = min(asked["max_output_tokens"], 300)
    body = {**asked, "instructions": "Be brief.", "input": turns}
    assert server.post(body, PATH).json()["error"]["code"] == "context_length_exceeded"
    got = server.post({**body, "truncation": "auto"}, PATH).json()
    for start in range(0, len(turns), 2):
        fitting = server.post({**body, "input": turns[start:]}, PATH)
        if fitting.status_code == 200:
            break
    assert start > 2 and settled({**got, "truncation": 0}) == settled({**fitting.json(), "truncation": 0})
    assert got["usage"]["input_tokens"] == fitting.json()["usage"]["input_tokens"]
    endless = {**body, "input": "x" * (9 * positions), "truncation": "auto"}
    assert server.post(endless, PATH).json()["error"]["code"] == "context_length_exceeded"


def test_reasoning_text_and_calls_are_one_message():
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"days": 1}'}
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So", "annotations": []}]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "Sun"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
        {"role": "assistant", "content": "Or"},
    ]
    got = parse_response({"input": items}, Kept()).prompts[0]
    function = {"name": "weather", "arguments": {"days": 1}}
    assert got == [
        {
            "role": "assistant",
            "content": "So",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": one, "type": "function", "function": function} for one in "12"],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Sun"},
        {"role": "assistant", "content": "No"},
        {"role": "assistant", "content": "Or"},
    ]


def test_what_is_kept_has_a_bound(monkeypatch):
    monkeypatch.setattr(kept, "_MOST_BYTES", 5000)
    answers = Kept()
    for number in range(300):
        answers.add({"id": f"resp_{number}", "output": []}, [{"content": "x" * (number % 300)}])
    there = [number for number in range(300) if _is_kept(answers, f"resp_{number}")]
    assert there == list(range(there[0], 300)) and 10 < len(there) < 20
    answers.add({"id": "long", "output": []}, [{"content": "x" * 6000}])
    assert not _is_kept(answers, "long") and _is_kept(answers, "resp_299")


def _is_kept(answers, name):
    try:
        answers.get(name)
    except ApiError:
        return False
    return True


def test_what_cannot_change_a_text_is_ignored():
    plain = parse_response({"input": "x", "seed": 1}, Kept())
    more = {name: ["anything"] for name, field in RESPONSE.items() if isinstance(field, Ignored)}
    more["reasoning"] = {name: "auto" for name, field in REASONING.items() if isinstance(field, Ignored)}
    got = parse_response({"input": "x", "seed": 1, **more}, Kept())
    assert more and vars(got) | {"response": None} == vars(plain) | {"response": None}


def test_verbosity_and_effort_are_variables_of_the_template():
    both = {"reasoning_effort": "low", "verbosity": "high"}
    chat = parse({"messages": [{"role": "user", "content": "x"}], **both}, True)
    asked = parse_response({"input": "x", "reasoning": {"effort": "low"}, "text": {"verbosity": "high"}}, Kept())
    assert chat.template_kwargs == asked.template_kwargs == {**both, "enable_thinking": True}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "nmae": "y"}]}, "input[0].nmae"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "gone"}]}, "input[0].id"),
        ({"inputs": "x"}, "inputs"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_output_tokens": 601}, "max_output_tokens"),
        ({"previous_response_id": "gone"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"include": ["everything"]}, "include"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "clock"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_honoured_is_a_400_with_its_place(server, fields, place):
    answer = server.post({"input": "x", **fields}, PATH)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(place)
    assert error["param"] == place.partition("[")[0].partition(".")[0]


def test_each_kind_of_item_is_read():
    """None of them asks for more than it documents."""
    own = {"role": "user", "call_id": "1", "name": "f", "arguments": "{}", "content": "x", "output": "x", "id": "gone"}
    for kind, fields in ITEMS.items():
        item = {"type": kind} | {
            name: own[name] for name in fields if name in own and (kind, name) != ("reasoning", "content")
        }
        try:
            assert parse_response({"input": [item]}, Kept()).prompts[0]
        except ApiError as error:
            assert kind == "item_reference" and "kept" in error.message
