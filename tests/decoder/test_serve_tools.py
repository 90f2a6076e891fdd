"""Tool calls and reasoning: calls hold to their schemas, streams join to the whole answer, histories are rendered."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from decoder import Decoder, SamplingParams, constraints
from decoder.constraints.behind import BehindReasoning
from decoder.serve.answer_parts import AnswerParts
from decoder.serve.harmony import END, MARKS, HarmonyParts
from decoder.serve.tool_forms import GRANITE, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, form_of

from .conftest import tiny_llama
from .serving import QWEN, TEMPLATE, WEATHER, calling_decoder, served, served_by, speaking_decoder

pytest.importorskip("llguidance")

CHAT = [{"role": "user", "content": "Hi?"}]
PATH = "/v1/chat/completions"
CLOCK = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a day", "parameters": WEATHER, "strict": True},
    },
    {"type": "function", "function": {"name": "clock", "parameters": CLOCK}},
]
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
QUIET = {"enable_thinking": False}
# Towards calls, their end and the end of the text, which a random model finds only by chance.
TOWARDS_CALLS = {"256": 14, "257": 12, "260": 10}


dec, server = served_by(calling_decoder, max_tokens=600)


def checked(calls):
    for call in calls:
        assert call.type == "function" and len(call.id) == 9 and call.id.isalnum()
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


def joined(chunks):
    """The message, the finish reason and the number of log-probabilities that chunks of one choice make up."""
    made, calls, reason, logprobs = {"content": "", "reasoning_content": ""}, [], None, 0
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            made["content"] += delta.content or ""
            made["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
            reason = choice.finish_reason or reason
            logprobs += len(choice.logprobs.content) if choice.logprobs else 0
    return made, [tuple(call) for call in calls], reason, logprobs


ASKING = {
    "required": dict(tool_choice="required"),
    "one function": dict(tool_choice={"type": "function", "function": {"name": "clock"}}),
    "one call": dict(tool_choice="required", parallel_tool_calls=False),
    "auto": dict(tool_choice="auto", logit_bias=TOWARDS_CALLS),
    "allowed": dict(
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]},
        }
    ),
    "after reasoning": dict(
        tool_choice="required", chat_template_kwargs={"forced_thinking": True}, logit_bias={"259": 5}
    ),
}


@pytest.mark.parametrize("name", ASKING)
def test_calls_hold_to_their_schemas_and_streams_join_to_them(server, name):
    fields = dict(ASKING[name])
    extra = {"chat_template_kwargs": fields.pop("chat_template_kwargs", QUIET)}
    found = []
    for seed in range(4):
        asked = dict(model="tiny", messages=CHAT, tools=TOOLS, seed=seed, max_tokens=500, extra_body=extra, **fields)
        asked |= dict(logprobs=True, top_logprobs=1)
        whole = server.openai.chat.completions.create(**asked)
        choice = whole.choices[0]
        streamed, calls, reason, logprobs = joined(server.openai.chat.completions.create(**asked, stream=True))
        assert streamed["content"] == (choice.message.content or "")
        assert streamed["reasoning_content"] == (getattr(choice.message, "reasoning_content", None) or "")
        assert calls == checked(choice.message.tool_calls or [])
        assert reason == choice.finish_reason == ("tool_calls" if calls else "stop")
        assert logprobs == whole.usage.completion_tokens
        found += calls
    names = {called for called, _ in found}
    only = {"one function": {"clock"}, "allowed": {"weather"}}
    assert found and names <= only.get(name, names)


@pytest.mark.parametrize("function", [{}, {"parameters": {}}])
def test_without_parameters_a_call_has_an_empty_object(server, function):
    asked = {"messages": CHAT, **named(name="f", **function), "tool_choice": "required", "parallel_tool_calls": False}
    body = server.post({**asked, "max_tokens": 200, "seed": 2, "chat_template_kwargs": QUIET}, PATH).json()
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_call_that_the_length_cuts_leaves_no_markup(server):
    asked = dict(model="tiny", messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=12, seed=1)
    choice = server.openai.chat.completions.create(**asked, extra_body={"chat_template_kwargs": QUIET}).choices[0]
    assert choice.message.content is None and not choice.message.tool_calls and choice.finish_reason == "length"
    streamed = server.openai.chat.completions.create(**asked, stream=True, extra_body={"chat_template_kwargs": QUIET})
    message, calls, reason, _ = joined(streamed)
    assert (message["content"], calls, reason) == ("", [], "length")


def test_a_call_that_a_stop_cuts_is_none_to_be_made(server):
    asked = dict(messages=CHAT, tools=TOOLS, max_tokens=200, seed=1, stop=["city"])
    asked |= dict(parallel_tool_calls=False, chat_template_kwargs=QUIET)
    asked["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    assert server.post(asked, PATH).json()["choices"][0]["finish_reason"] == "stop"
    assert server.post({**asked, "stop": ["none"]}, PATH).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_functions_are_tools_in_their_old_form(server):
    """One call, as ``function_call``; its result goes back as a message of the role ``function``."""
    chat, functions = server.openai.chat.completions, [tool["function"] for tool in TOOLS]
    functions = [{name: one[name] for name in one if name != "strict"} for one in functions]
    asked = dict(model="tiny", messages=CHAT, max_tokens=500, seed=1, extra_body={"chat_template_kwargs": QUIET})
    new = chat.create(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}, **asked)
    old = chat.create(functions=functions, function_call={"name": "weather"}, **asked)
    call = old.choices[0].message.function_call
    assert call.to_dict() == new.choices[0].message.tool_calls[0].function.to_dict()
    assert old.choices[0].finish_reason == "function_call" and old.choices[0].message.tool_calls is None
    name, arguments = "", ""
    for chunk in chat.create(functions=functions, function_call={"name": "weather"}, stream=True, **asked):
        if part := chunk.choices[0].delta.function_call:
            name, arguments = name + (part.name or ""), arguments + part.arguments
    assert (name, arguments) == (call.name, call.arguments)
    assert chunk.choices[0].finish_reason == "function_call"
    texts = []
    for message, role, by in ((old, "function", {"name": "weather"}), (new, "tool", {"tool_call_id": "123456789"})):
        messages = [*CHAT, message.choices[0].message, {"role": role, "content": "Sun", **by}]
        texts.append(chat.create(**{**asked, "messages": messages, "max_tokens": 9}).choices[0].message.content)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"functions": [{"parameters": {}}]}, "functions[0].name"),
        ({"functions": [{"name": "f", "strict": True}]}, "functions[0].strict"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "function_call": {"name": "weather"}}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
    ids=str,
)
def test_functions_that_cannot_be_called_are_a_400(server, fields, place):
    answer = server.post({"messages": CHAT, **fields}, PATH)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(place)


def test_reasoning_is_apart_unless_it_is_to_stay(server):
    body = dict(messages=CHAT, max_tokens=200, seed=3, chat_template_kwargs={"forced_thinking": True})
    body |= dict(logit_bias={"259": 3, "260": -20})
    message = server.post(body, PATH).json()["choices"][0]["message"]
    assert message["reasoning_content"] and message["content"]
    kept = server.post({**body, "separate_reasoning": False}, PATH).json()["choices"][0]["message"]
    assert "reasoning_content" not in kept
    before, _, behind = kept["content"].partition("</think>")
    assert (before.strip(), behind.lstrip()) == (message["reasoning_content"], message["content"])
    left_out = server.post({**body, "include_reasoning": False}, PATH).json()["choices"][0]["message"]
    assert left_out == {"role": "assistant", "content": message["content"]}


@pytest.mark.parametrize("method", ["ar", "auto", "tokenswift", "prompt-lookup"])
def test_a_shape_begins_behind_the_reasoning_whatever_drafts(server, dec, method):
    end = dec.tokenizer.convert_tokens_to_ids("</think>")
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 3}
    body = dict(messages=CHAT, max_tokens=200, seed=5, method=method, logit_bias={str(end): 5})
    body |= dict(chat_template_kwargs={"forced_thinking": True})
    shape = dict(structured_outputs={"json": schema, "disable_any_whitespace": True})
    message = server.post(body | shape, PATH).json()["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), schema)
    assert message["reasoning_content"]
    gaps = tuple(dec.tokenizer.encode("\n"))
    inner = constraints.json_schema(schema, any_whitespace=False)
    sampling = SamplingParams(seed=5, logit_bias={end: 5}, constraint=BehindReasoning(inner, end, gaps=gaps))
    ids = dec.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, forced_thinking=True, return_dict=False)
    text = dec.generate(ids, 200, "ar", sampling).text
    before, _, behind = text.partition("</think>")
    assert (before.strip(), behind.lstrip()) == (message["reasoning_content"], message["content"])


@pytest.mark.slow
def test_fifty_clients_with_tools_and_schemas_get_what_they_would_get_alone(dec):
    """Twenty others leave half way; afterwards nothing runs or waits."""

    def body(index):
        shapes = [
            dict(tools=TOOLS, tool_choice="required", chat_template_kwargs=QUIET),
            dict(response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}),
            dict(tools=TOOLS, logit_bias=TOWARDS_CALLS, chat_template_kwargs=QUIET),
            dict(guided_regex="[a-z]{30,60}"),
        ]
        return dict(messages=CHAT, seed=index, max_tokens=40 + index) | shapes[index % 4]

    def parts(answer):
        message = answer["choices"][0]["message"]
        return message["content"], [call["function"] for call in message.get("tool_calls", ())]

    def left(server, index):
        with server.http.stream("POST", PATH, json={**body(index), "stream": True, "ignore_eos": True}) as answer:
            next(answer.iter_bytes())

    with served(dec, max_batch=8, max_queue=100) as server, ThreadPoolExecutor(70) as pool:
        sent = [pool.submit(server.post, body(index), PATH) for index in range(50)]
        gone = [pool.submit(left, server, index) for index in range(20)]
        together = [parts(one.result().json()) for one in sent]
        assert [one.result() for one in gone] == [None] * 20 and server.idle(30)
        alone = [parts(server.post(body(index), PATH).json()) for index in range(0, 50, 3)]
    assert together[::3] == alone and sum(bool(calls) for _, calls in together) > 15


def test_a_loop_of_calls_and_results(server):
    """As agents do it, with the client's own objects."""
    messages = list(CHAT)
    for seed in range(3):
        got = server.openai.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            seed=seed,
            extra_body={"chat_template_kwargs": QUIET},
            parallel_tool_calls=False,
            max_tokens=300,
        )
        message = got.choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    last = server.openai.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5, seed=1
    )
    assert last.choices[0].message.tool_calls is None


def test_the_template_renders_tools_and_earlier_calls(server, dec, monkeypatch):
    rendered = []
    plain = dec.tokenizer.apply_chat_template
    monkeypatch.setattr(
        server.service.reading._small[1],
        "apply_chat_template",
        lambda chat, **kwargs: rendered.append((chat, kwargs)) or plain(chat, **kwargs),
    )
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": '{"a": [1]}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "abcdefghi", "content": "noon"})
    body = dict(messages=messages, tools=TOOLS, max_tokens=3, chat_template_kwargs=QUIET, reasoning_effort="high")
    assert server.post(body, PATH).status_code == 200
    chat, kwargs = rendered[-1]
    assert chat[1]["tool_calls"][0]["function"] == {"name": "clock", "arguments": {"a": [1]}}
    assert chat[2]["tool_call_id"] == "abcdefghi" and kwargs["reasoning_effort"] == "high"
    assert [tool["function"]["name"] for tool in kwargs["tools"]] == ["weather", "clock"]
    assert '{"name": "clock", "arguments": {"a": [1]}}' in plain(chat, tokenize=False)


def named(**function):
    return {"tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (named(), "tools[0].function.name"),
        (named(name="a b"), "tools[0].function.name"),
        (named(name="a", parameters="x"), "tools[0].function.parameters"),
        (named(name="a", parmeters={}), "tools[0].function.parmeters"),
        (named(name="a", parameters={"type": "integer", "minimum": 3, "maximum": 1}), "tools[0].function.parameters: "),
        ({"tools": TOOLS + named(name="a", parameters={"$ref": "#/none"})["tools"]}, "tools[2].function.parameters: "),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS + TOOLS}, "tools[2].function.name"),
        ({"tools": "weather"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "weather"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
    ids=str,
)
def test_tools_that_are_none_are_a_400_with_the_place(server, fields, place):
    answer = server.post({"messages": CHAT, **fields}, PATH)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(place)
    # Of a schema that cannot be kept the whole place, since there may be many.
    assert error["param"] == (place[:-2] if ": " in place else place.partition("[")[0].partition(".")[0])


def test_tools_and_calls_need_a_template_that_passes_them_on():
    with served(speaking_decoder()) as server:
        answer = server.post({"messages": CHAT, "tools": TOOLS}, PATH)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        answer = server.post({"messages": CHAT, "functions": [{"name": "f"}]}, PATH)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "functions"
        call = {"type": "function", "function": {"name": "clock", "arguments": "{}"}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, *CHAT]
        answer = server.post({"messages": messages}, PATH)
        assert answer.status_code == 400 and "messages[0].tool_calls" in answer.json()["error"]["message"]
        assert server.post({"messages": CHAT, "tools": TOOLS, "tool_choice": "none", "max_tokens": 2}, PATH).is_success


RENDERS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[-1].content }}"
CALL = '{"city": "P\\"}a", "x": [1, {"y": 2}]}'
TAUGHT = {
    "Qwen": (QWEN, HERMES, f'<tool_call>\n{{"name": "w", "arguments": {CALL}}}\n</tool_call>'),
    "Llama 3": (RENDERS + "<|python_tag|>", LLAMA, f'{{"name": "w", "parameters": {CALL}}}'),
    "Mistral": (RENDERS + "[TOOL_CALLS]", MISTRAL, f'[TOOL_CALLS][{{"name": "w", "arguments": {CALL}}}]'),
    "newer Mistral": (RENDERS + "[TOOL_CALLS][ARGS]", MISTRAL_ARGS, f"[TOOL_CALLS]w[ARGS]{CALL}"),
    "Granite": (RENDERS + "<|tool_call|>", GRANITE, f'<|tool_call|>[{{"name": "w", "arguments": {CALL}}}]'),
}


@pytest.mark.parametrize("name", TAUGHT)
@pytest.mark.parametrize("marks_are_tokens", [True, False])
def test_each_form_is_found_written_and_read(name, marks_are_tokens):
    template, form, text = TAUGHT[name]
    assert form_of(template) is form
    dec = speaking_decoder() if not marks_are_tokens else None
    tokenizer = dec.tokenizer if dec else calling_decoder().tokenizer
    if marks_are_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": list(form.marks)})
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "x": {}}, "required": ["city"]}
    ids = tokenizer.encode(text, add_special_tokens=False)
    for required, parallel in ((True, False), (True, True), (False, True)):
        grammar = form.grammar({"w": schema, "v": {}}, tokenizer, required, parallel)
        vocabulary = constraints.Vocabulary(len(tokenizer), tokenizer, frozenset({7}), frozenset({7}))
        state = grammar.start(vocabulary)
        for index, token in enumerate(ids):
            assert state.allows(token), (required, text[:index])
            state.advance(token)
        assert state.allows(7)
    rng = random.Random(1)
    expected = [("call", "w"), ("arguments", CALL)]
    for pieces in (1, 2, 7, len(text)):
        reader, parts = AnswerParts(None, form), []
        cuts = sorted(rng.sample(range(1, len(text)), pieces - 1)) if pieces < len(text) else range(1, len(text))
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            parts += reader.feed(text[start:end])
        parts += reader.feed("", final=True)
        merged = []
        for part in parts:
            if merged and merged[-1][0] == part.kind:
                merged[-1] = (part.kind, merged[-1][1] + part.text)
            else:
                merged.append((part.kind, part.text))
        assert merged == expected


HARMONY = (
    "{% for tool in tools or [] %}{{ tool | tojson }} to=functions{% endfor %}{% for message in messages %}"
    "<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}<|start|>assistant"
    "{# <|channel|> #}"
)


@pytest.fixture(scope="module")
def harmonious():
    """A decoder whose template is of gpt-oss' form."""
    dec = calling_decoder()
    dec.tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    dec.tokenizer.chat_template = HARMONY
    model = tiny_llama(vocab_size=len(dec.tokenizer))
    return Decoder(model, dec.tokenizer)


def test_gpt_oss_answers_are_read_channel_by_channel(harmonious):
    marked = {mark: harmonious.tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
    # Towards the marks that a message needs to come to its end.
    bias = {str(marked[END]): 4}
    with served(harmonious, max_tokens=600) as server:
        shapes = [
            dict(tools=TOOLS, tool_choice="required"),
            dict(tools=TOOLS),
            dict(extra_body={"structured_outputs": {"json": WEATHER, "disable_any_whitespace": True}}),
        ]
        for shape in shapes:
            asked = dict(model="tiny", messages=CHAT, seed=2, max_tokens=500, logit_bias=bias, **shape)
            message = server.openai.chat.completions.create(**asked).choices[0].message
            streamed, calls, _, _ = joined(server.openai.chat.completions.create(**asked, stream=True))
            assert streamed["content"] == (message.content or "")
            assert streamed["reasoning_content"] == (getattr(message, "reasoning_content", None) or "")
            assert calls == checked(message.tool_calls or [])
            assert bool(calls) >= ("tool_choice" in shape)
            if "extra_body" in shape:
                assert message.content.endswith("}")
                jsonschema.validate(json.loads(message.content[message.content.rindex("{") :]), WEATHER)


def test_gpt_oss_messages_and_calls_in_pieces():
    text = "<|channel|>analysis<|message|>Hm <x<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
    text += '<|end|><|start|>assistant<|channel|>commentary to=functions.w <|constrain|>json<|message|>{"a": 1}'
    for size in (1, 3, len(text)):
        reader, found = HarmonyParts(), {}
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        for part in [part for piece in pieces for part in reader.feed(piece)] + reader.feed("", final=True):
            found[part.kind] = found.get(part.kind, "") + part.text
        assert found == {"reasoning": "Hm <x", "content": "Let me see.", "call": "w", "arguments": '{"a": 1}'}


def test_templates_without_tools_or_with_unknown_forms_have_none():
    assert form_of(TEMPLATE + "<tool_call>") is None
    assert form_of(RENDERS + "<tool_call><function=name>") is None and form_of(RENDERS) is None


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain  ", "plain  ", 0),
        ("a <tool", "a <tool", 0),
        ("a <tool_call>\nno call", "a <tool_call>\nno call", 0),
        ('Well.\n\n<tool_call>\n{"name": "w", "arguments": {}}\n</tool_call>', "Well.", 1),
        ('<tool_call>\n{"name": "w", "arguments": {"a', "", 1),
        ('Well.\n<tool_call>\n{"name": "w",', "Well.", 0),
        ('<tool_call>\n{"name": "w", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na', "", 1),
        (('<tool_call>\n{"name": "w", "arguments": {}}\n</tool_call>\n' * 2).strip(), "", 2),
    ],
)
def test_text_that_is_no_call_or_is_cut_short(text, content, calls):
    reader = AnswerParts(None, HERMES)
    parts = [part for letter in text for part in reader.feed(letter)] + reader.feed("", final=True)
    assert "".join(part.text for part in parts if part.kind == "content") == content and reader.calls == calls


@pytest.mark.parametrize("arguments", ['{"a": 1, "a": 2}', "{", "[1]", '{"a": "\\ud800"}'])
def test_arguments_of_earlier_calls_are_checked_as_bodies_are(server, arguments):
    call = {"id": "x", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    answer = server.post({"messages": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}]}, PATH)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages"
    assert "].tool_calls[0].function.arguments" in error["message"]
