"""Every field of a request is honoured, or cannot change the text, or is refused by its name."""

import re
from dataclasses import fields as fields_of
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import chat as openai_chat
from openai.types import completion_create_params, responses, shared_params

from decoder import SamplingParams
from decoder.serve.errors import ApiError
from decoder.serve.fields import (
    ALLOWED_TOOLS,
    CALLED,
    CHAT,
    CHOICE_OF_TOOL,
    COMPLETION,
    DETOKENIZE,
    FLAT_CHOICE,
    FLAT_TOOL,
    FUNCTION,
    ITEMS,
    JSON_SCHEMA,
    MESSAGE,
    OLD_FUNCTION,
    PART,
    PART_OF_ITEM,
    REASONING,
    RESPONSE,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
    STRUCTURED_OUTPUTS,
    TEXT_OF_RESPONSE,
    TOKENIZE,
    TOOL,
    TOOL_CALL,
    Honoured,
    Ignored,
    Refused,
)
from decoder.serve.requests import parse

from .serving import served_by, speaking_decoder

PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}
TABLES = {True: CHAT, False: COMPLETION}
ASKED = {True: {"messages": [{"role": "user", "content": "Call me"}]}, False: {"prompt": "Call me"}}
ROLES = ("Developer", "System", "User", "Assistant", "Tool", "Function")
GUIDE = Path(__file__).parents[2] / "docs/guides/serve.md"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=6,
)
both = pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])


dec, server = served_by(speaking_decoder, max_tokens=200)


def refused(body, chat):
    with pytest.raises(ApiError) as raised:
        parse(body, chat)
    assert raised.value.status == 400 and "\n" not in raised.value.message and len(raised.value.message) < 400
    return raised.value


def names_of(chat, kind):
    return sorted(name for name, field in TABLES[chat].items() if isinstance(field, kind))


DOCUMENTED = [
    (openai_chat.completion_create_params.CompletionCreateParamsBase, CHAT),
    (openai_chat.completion_create_params.CompletionCreateParamsStreaming, CHAT),
    (completion_create_params.CompletionCreateParamsBase, COMPLETION),
    (completion_create_params.CompletionCreateParamsStreaming, COMPLETION),
    (responses.response_create_params.ResponseCreateParamsBase, RESPONSE),
    (responses.response_create_params.ResponseCreateParamsStreaming, RESPONSE),
    (openai_chat.ChatCompletionStreamOptionsParam, STREAM_OPTIONS),
    (responses.response_create_params.StreamOptions, STREAM_OPTIONS),
    *((getattr(openai_chat, f"ChatCompletion{role}MessageParam"), MESSAGE) for role in ROLES),
    (openai_chat.ChatCompletionContentPartTextParam, PART),
    (openai_chat.ChatCompletionContentPartRefusalParam, PART),
    (openai_chat.ChatCompletionMessageFunctionToolCallParam, TOOL_CALL),
    (openai_chat.chat_completion_message_function_tool_call_param.Function, CALLED),
    (openai_chat.chat_completion_assistant_message_param.FunctionCall, CALLED),
    (openai_chat.completion_create_params.Function, OLD_FUNCTION),
    (openai_chat.ChatCompletionFunctionToolParam, TOOL),
    (shared_params.FunctionDefinition, FUNCTION),
    (openai_chat.ChatCompletionNamedToolChoiceParam, CHOICE_OF_TOOL),
    (openai_chat.ChatCompletionAllowedToolChoiceParam, CHOICE_OF_TOOL),
    (openai_chat.ChatCompletionAllowedToolsParam, ALLOWED_TOOLS),
    (shared_params.ResponseFormatText, RESPONSE_FORMAT),
    (shared_params.ResponseFormatJSONObject, RESPONSE_FORMAT),
    (shared_params.ResponseFormatJSONSchema, RESPONSE_FORMAT),
    (shared_params.response_format_json_schema.JSONSchema, JSON_SCHEMA),
    (responses.ResponseFormatTextJSONSchemaConfigParam, RESPONSE_FORMAT),
    (responses.ResponseTextConfigParam, TEXT_OF_RESPONSE),
    (shared_params.Reasoning, REASONING),
    (responses.FunctionToolParam, FLAT_TOOL),
    (responses.ToolChoiceFunctionParam, FLAT_CHOICE),
    (responses.ToolChoiceAllowedParam, FLAT_CHOICE),
    (responses.ResponseInputTextParam, PART_OF_ITEM),
    (responses.ResponseOutputTextParam, PART_OF_ITEM),
    (responses.ResponseOutputRefusalParam, PART_OF_ITEM),
    (responses.EasyInputMessageParam, ITEMS["message"]),
    (responses.response_input_param.Message, ITEMS["message"]),
    (responses.ResponseOutputMessageParam, ITEMS["message"]),
    (responses.ResponseReasoningItemParam, ITEMS["reasoning"]),
    (responses.ResponseFunctionToolCallParam, ITEMS["function_call"]),
    (responses.response_input_param.FunctionCallOutput, ITEMS["function_call_output"]),
    (responses.response_input_param.ItemReference, ITEMS["item_reference"]),
]
# Of what OpenAI documents: what is no text, or needs another model, tools or conversations of OpenAI's own.
NOT_HONOURED = {
    *("audio", "modalities", "moderation", "web_search_options", "suffix"),
    *("background", "context_management", "conversation", "prompt", "mode"),
    *("encrypted_content", "namespace", "async", "defer_loading"),
}


@pytest.mark.parametrize(("documented", "table"), DOCUMENTED, ids=lambda value: getattr(value, "__name__", ""))
def test_each_field_that_openais_client_documents_is_decided(documented, table):
    # Names that are words of Python have another one in its types.
    names = set(get_type_hints(documented)) - {"async_"}
    assert names <= set(table)
    assert {name for name in names if isinstance(table[name], Refused)} <= NOT_HONOURED


@both
def test_each_sampling_parameter_is_a_field(chat):
    """A new one would otherwise be an unknown name."""
    values = dict(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        eta_cutoff=0.01,
        repetition_penalty=1.1,
        penalty_window=7,
        seed=5,
        suppress_tokens=[4],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "3": 1.5},
        min_tokens=2,
        bad_words=["no"],
        include_stop_str_in_output=True,
    )
    sampling = parse({**ASKED[chat], **values}, chat).sampling
    kept = {**values, "suppress_tokens": (4,), "logit_bias": ((3, 1.5), (7, -100.0)), "bad_words": ("no",)}
    # A request has no prompt that ends in an output, and no constraint yet.
    for name in {field.name for field in fields_of(SamplingParams)} - {"constraint", "continued_tokens"}:
        assert name in values, f"{name}: decide what a request can do with it"
        assert getattr(sampling, name) == kept[name]


@both
@pytest.mark.parametrize("bias", [[1], {"a": 1}, {"-1": 1}, {"1": "x"}, {"1": True}, {"1": 101}, {"9" * 30: 1}])
def test_a_bias_that_is_none_is_a_400_with_the_field(chat, bias):
    with pytest.raises(ApiError, match=r"^logit_bias") as refused:
        parse({**ASKED[chat], "logit_bias": bias}, chat)
    assert refused.value.status == 400


@both
@settings(deadline=None)
@given(data=st.data())
def test_a_typing_error_is_named_with_what_is_meant(chat, data):
    name = data.draw(st.sampled_from([name for name in names_of(chat, Honoured) if len(name) > 8]))
    at = data.draw(st.integers(1, len(name) - 2))
    letters = data.draw(st.sampled_from("aeioxz_"))
    typed = data.draw(
        st.sampled_from([name[:at] + name[at + 1 :], name[:at] + letters + name[at:], name.upper(), name + "s"])
    )
    if typed in TABLES[chat]:
        return
    error = refused({**ASKED[chat], typed: data.draw(JSON)}, chat)
    assert error.param == typed and typed in error.message and name in error.message


@both
@settings(deadline=None)
@given(name=st.text(min_size=1, max_size=2000), value=JSON)
def test_an_unknown_name_is_a_400_whatever_it_is(chat, name, value):
    if name not in TABLES[chat]:
        assert "is no known field" in refused({**ASKED[chat], name: value}, chat).message


@both
@settings(deadline=None)
@given(data=st.data())
def test_any_value_of_any_field_is_taken_or_refused_by_its_name(chat, data):
    name = data.draw(st.sampled_from(sorted(TABLES[chat])))
    value = data.draw(JSON)
    try:
        parse({**ASKED[chat], name: value}, chat)
    except ApiError as error:
        assert error.status == 400 and error.param == name and error.message.startswith(name)


@both
def test_what_asks_for_nothing_changes_nothing(server, chat):
    """Null, what is ignored, and the values with which an unsupported field asks for nothing."""
    body = {**ASKED[chat], "max_tokens": 12, "seed": 4, "temperature": 0.8}
    expected = server.post(body, PATHS[chat]).json()["choices"]
    more = {name: None for name in TABLES[chat] if name not in body}
    assert server.post({**body, **more}, PATHS[chat]).json()["choices"] == expected
    more = {name: ["anything", {"a": 1}] for name in names_of(chat, Ignored)}
    assert server.post({**body, **more}, PATHS[chat]).json()["choices"] == expected
    for index in range(2):
        more = {
            name: field.harmless[index]
            for name, field in TABLES[chat].items()
            if isinstance(field, Refused) and index < len(field.harmless)
        }
        assert more and server.post({**body, **more}, PATHS[chat]).json()["choices"] == expected


# As clients of vLLM, SGLang, llama.cpp, transformers and OpenAI send them.
OF_OTHERS = {
    **dict(stop_regex="a+", guided_whitespace_pattern=" "),
    **dict(repeat_penalty=1.3, repeat_last_n=64, dry_multiplier=0.8, mirostat=2, xtc_probability=0.5, top_n_sigma=1),
    **dict(n_predict=1, max_new_tokens=3, min_new_tokens=9, allowed_token_ids=[3]),
    **dict(tool_choice="required", n_probs=3, no_stop_trim=True),
    **dict(do_sample=False, bad_words_ids=[[5]]),
    **dict(truncate_prompt_tokens=5, return_token_ids=True, presence_penality=0, temprature=0),
    **dict(presence_penalty_=False, Temperature=0, topP=0.5, maxTokens=3, extra_body={"top_k": 1}, options={}),
}


@both
@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_would_change_the_text_is_named(server, chat, name):
    answer = server.post({**ASKED[chat], name: OF_OTHERS[name]}, PATHS[chat])
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == name and error["message"].startswith(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("topP", "top_p"),
        ("repeat_penalty", "repetition_penalty"),
        ("n_predict", "max_tokens"),
        ("repetion_penalty", "repetition_penalty"),
        ("min_new_token", "min_new_tokens"),
        ("sead", "seed"),
        ("stop_tokens_ids", "stop_token_ids"),
    ],
)
def test_the_nearest_known_name_is_given(name, meant):
    assert meant in refused({**ASKED[False], name: 1.5}, False).message


def test_the_nearest_known_value_is_given():
    assert refused({**ASKED[False], "method": "sufix"}, False).message.endswith(" (is suffix meant?)")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": False}, "presence_penalty"),  # not the number 0
        ({"num_beams": True}, "num_beams"),
        ({"stream_options": {"include_usages": True}}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"stop_token_ids": [256]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"suppress_tokens": [256]}, "suppress_tokens"),
        ({"suppress_tokens": [-1]}, "suppress_tokens"),
        ({"suppress_tokens": list(range(256))}, None),
        ({"logit_bias": {"1": 1, "256": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"seed": 2**63 - 1, "n": 2}, "seed"),
        ({"method": "faster"}, "method"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"prompt": ["x", "y"], "best_of": 70}, "best_of"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
    ids=str,
)
def test_values_that_cannot_be_honoured_are_a_400(server, fields, param):
    answer = server.post({"prompt": "Call me", **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_the_largest_seed_can_be_asked_for(server):
    assert server.post({"prompt": "x", "max_tokens": 1, "seed": 2**63 - 2, "n": 2}).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stop_tokens_end_a_text_as_in_generate(server, dec, stream):
    sampling = SamplingParams(seed=2)
    tokens = dec.generate("Call me", 60, sampling=sampling).token_ids
    ends = sorted({tokens[20], tokens[33]})
    expected = dec.generate("Call me", 60, sampling=sampling, stop=ends)
    asked = dict(model="tiny", prompt="Call me", max_tokens=60, seed=2, extra_body={"stop_token_ids": ends})
    if stream:
        chunks = list(server.openai.completions.create(**asked, stream=True))
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = server.openai.completions.create(**asked).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (expected.text, "stop") and len(expected.token_ids) < 60


def test_suppressed_tokens_are_never_chosen(server, dec):
    plain = dec.generate("Call me", 40, sampling=SamplingParams(seed=2)).token_ids
    sampling = SamplingParams(seed=2, suppress_tokens=tuple(set(plain)))
    got = server.post({"prompt": "Call me", "max_tokens": 40, "seed": 2, "suppress_tokens": sorted(set(plain))})
    assert got.json()["choices"][0]["text"] == dec.generate("Call me", 40, "ar", sampling).text


def message(**fields):
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "x", **fields}]}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"role": None}, "messages[1].role"),
        ({"role": ["user"]}, "messages[1].role"),
        ({"content": None}, "messages[1].content"),
        ({"content": 3}, "messages[1].content"),
        ({"content": [{"type": "text", "text": "a"}, "b"]}, "messages[1].content[1]"),
        ({"content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"content": [{"text": "a"}]}, "messages[1].content[0].type"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0].type"),
        ({"content": [{"type": "text", "text": "a", "txet": "b"}]}, "messages[1].content[0].txet"),
        ({"tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0].function"),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": "["}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"reasoning_content": 3}, "messages[1].reasoning_content"),
        ({"contents": "b"}, "messages[1].contents"),
        ({"prefix": True}, "messages[1].prefix"),
    ],
    ids=str,
)
def test_what_a_message_cannot_have_is_told_with_its_place(fields, place):
    error = refused(message(**fields), True)
    assert error.param == "messages" and error.message.startswith(place)


@settings(deadline=None)
@given(JSON)
def test_any_messages_are_taken_or_refused(value):
    for messages in (value, [value], [{"role": "user", "content": value}], [{"role": "user", "content": [value]}]):
        try:
            parse({"messages": messages}, True)
        except ApiError as error:
            assert error.status == 400 and error.param == "messages"


def test_an_answer_can_be_sent_back_as_it_came(server):
    """The client's own objects have fields that are null."""
    first = {"role": "user", "content": "Call me"}
    answer = server.openai.chat.completions.create(model="tiny", messages=[first], max_tokens=3, seed=1)
    messages = [first, answer.choices[0].message, {"role": "user", "content": "Go on", "name": "Ann"}]
    assert server.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1).choices


def test_the_guide_tells_of_each_field():
    told = set(re.findall(r"`(\w+)`", GUIDE.read_text(encoding="utf-8")))
    tables = [CHAT, COMPLETION, STREAM_OPTIONS, MESSAGE, PART, RESPONSE_FORMAT, JSON_SCHEMA, STRUCTURED_OUTPUTS]
    tables += [RESPONSE, TEXT_OF_RESPONSE, REASONING, PART_OF_ITEM, FLAT_TOOL, *ITEMS.values()]
    for table in (*tables, TOOL, FUNCTION, TOOL_CALL, CALLED, CHOICE_OF_TOOL, ALLOWED_TOOLS, TOKENIZE, DETOKENIZE):
        missing = {name for name, field in table.items() if not isinstance(field, Refused)} - told
        assert not missing, f"the guide to the server lacks {missing}"
