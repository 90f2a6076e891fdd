"""LangChain, LlamaIndex and OpenAI's agents against the server: texts, streams, shapes and loops of tools.

They are no dependency of the project: pip install langchain-openai llama-index-llms-openai-like openai-agents
"""

import asyncio
import json
from typing import Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict

from .serving import calling_decoder, served

pytest.importorskip("llguidance")

NO_SPACES = {"32": -100, "201": -100}
QUIET = {"enable_thinking": False}
EXTRA = {"seed": 1, "chat_template_kwargs": QUIET, "logit_bias": NO_SPACES}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]


class Where(BaseModel):
    """A place."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def server():
    with served(calling_decoder(), max_tokens=600) as running:
        yield running


def text_of(server, **fields):
    body = {"messages": CHAT, "max_tokens": 20, **EXTRA, **fields}
    return server.post(body, "/v1/chat/completions").json()["choices"][0]["message"]


def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2]) -> str:
    """The weather of some days."""
    return f"Sun in {city} for {days}"


@pytest.mark.parametrize("responses", [False, True], ids=["chats", "responses"])
def test_langchain(server, responses):
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool

    asked = [SystemMessage("Be brief."), HumanMessage("Where?")]
    common = dict(base_url=f"{server.url}/v1", api_key="none", model="tiny", use_responses_api=responses, max_retries=0)
    model = langchain.ChatOpenAI(**common, max_tokens=20, extra_body=EXTRA)
    expected = text_of(server)["content"]
    answer = model.invoke(asked)
    assert answer.text == expected and answer.usage_metadata["output_tokens"] == 20
    assert "".join(chunk.text for chunk in model.stream(asked)) == expected
    long = langchain.ChatOpenAI(**common, max_tokens=500, extra_body=EXTRA)
    shaped = long.with_structured_output(Where, method="json_schema").invoke("Where?")
    assert shaped.city in ("Paris", "Rome") and shaped.days in (1, 2)
    assert isinstance(long.with_structured_output(Where, method="function_calling").invoke("Where?"), Where)
    calling = long.bind_tools([tool(weather)], tool_choice="required", parallel_tool_calls=False, strict=True)
    called = calling.invoke(asked)
    [call] = called.tool_calls
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([tool(weather)]).invoke([*asked, called, result]).response_metadata
    joined = None
    for chunk in calling.stream(asked):
        joined = chunk if joined is None else joined + chunk
    assert [(one["name"], one["args"]) for one in joined.tool_calls] == [("weather", call["args"])]


def test_langchain_completions(server):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="tiny", max_tokens=20, seed=1, temperature=1
    )
    expected = server.post({"prompt": "Call me", "max_tokens": 20, "seed": 1}).json()["choices"][0]["text"]
    assert model.invoke("Call me") == expected == "".join(model.stream("Call me"))


def test_llama_index(server):
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    common = dict(model="tiny", api_base=f"{server.url}/v1", api_key="none", is_chat_model=True, max_retries=0)
    common |= dict(is_function_calling_model=True, context_window=2000, temperature=1.0)
    model = OpenAILike(**common, max_tokens=20, additional_kwargs={"extra_body": EXTRA})
    asked = [ChatMessage(role=one["role"], content=one["content"]) for one in CHAT]
    expected = text_of(server)["content"]
    assert model.chat(asked).message.content == expected
    assert [*model.stream_chat(asked)][-1].message.content == expected
    long = OpenAILike(**common, max_tokens=500, additional_kwargs={"extra_body": EXTRA})
    tool = FunctionTool.from_defaults(weather)
    answer = long.chat_with_tools([tool], chat_history=asked, tool_required=True)
    [call] = long.get_tool_calls_from_response(answer)
    result = ChatMessage(
        role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
    )
    assert long.chat([*asked, answer.message, result]).message.role == "assistant"
    assert isinstance(long.structured_predict(Where, _template("Where?")), Where)
    plain = OpenAILike(**{**common, "is_chat_model": False}, max_tokens=20, additional_kwargs={"seed": 1})
    expected = server.post({"prompt": "Call me", "max_tokens": 20, "seed": 1}).json()["choices"][0]["text"]
    assert plain.complete("Call me").text == expected
    assert [*plain.stream_complete("Call me")][-1].text == expected


def _template(text):
    from llama_index.core.prompts import PromptTemplate

    return PromptTemplate(text)


@pytest.mark.parametrize("responses", [False, True], ids=["chats", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_agents_loop_of_tools(server, responses, stream):
    """A call is made, its function is run, and the result goes back, until there is an answer."""
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    made = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2]) -> str:
        """The weather of some days."""
        made.append({"city": city, "days": days})
        return f"Sun in {city}"

    async def run():
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
        settings = agents.ModelSettings(
            tool_choice="required", max_tokens=300, parallel_tool_calls=False, extra_body={**EXTRA, "seed": 3}
        )
        agent = agents.Agent(
            name="Guide",
            instructions="Be brief.",
            model=kind("tiny", client),
            tools=[weather],
            model_settings=settings,
            output_type=Where,
        )
        if not stream:
            return await agents.Runner.run(agent, "Where?", max_turns=6)
        result = agents.Runner.run_streamed(agent, "Where?", max_turns=6)
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(run())
    assert made and isinstance(result.final_output, Where)
    items = result.to_input_list()
    schema = {"required": ["city", "days"], "additionalProperties": False, "properties": {"city": {}, "days": {}}}
    called = [json.loads(item["arguments"]) for item in items if item.get("type") == "function_call"]
    for arguments in called:
        jsonschema.validate(arguments, schema)
    assert called == made
