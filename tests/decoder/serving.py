"""A server in a thread of the test's own process, and the parts that tests of it share."""

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

import httpx2
import openai
import pytest
import uvicorn
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decoder import Decoder
from decoder.serve.app import make_app
from decoder.serve.metrics import Metrics
from decoder.serve.service import Service
from decoder.serve.settings import Settings

from ..tiny import byte_tokenizer
from .conftest import random_heads, tiny_llama

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
# A connection for each request: a server closes one that nobody uses, perhaps just when a busy machine uses it again.
ONE_USE = httpx2.Limits(max_keepalive_connections=0)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", 'R"om}e']}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Call me?"}]


LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}


def byte_of(dec, token):
    """The byte that a token of `byte_tokenizer` stands for, whether it is a character or a part of one."""
    return LETTERS[dec.tokenizer.convert_ids_to_tokens(token)]


def name_of(dec, token):
    """What a completion calls a token."""
    text = dec.tokenizer.decode([token])
    return text if text != "\ufffd" else f"bytes:\\x{byte_of(dec, token):02x}"


def speaking_decoder():
    """A decoder that a server can chat with."""
    model = tiny_llama(vocab_size=256)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Decoder(model, tokenizer, random_heads(model))


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
QWEN = """
{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
For each call write <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}
{%- if message.role == 'tool' %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif forced_thinking is defined %}<think>
{% endif %}{% endif %}"""


def calling_decoder():
    """One whose template knows tools and reasoning, as those of Qwen's models, with tokens for their marks."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = QWEN
    model = tiny_llama(vocab_size=len(tokenizer))
    return Decoder(model, tokenizer, random_heads(model))


class Running:
    """A started server."""

    def __init__(self, service, port):
        self.service, self.url = service, f"http://127.0.0.1:{port}"
        key = service.settings.api_key or "none"
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        self.http = httpx2.Client(base_url=self.url, timeout=60, limits=ONE_USE)

    def post(self, body, path="/v1/completions", **more):
        return self.http.post(path, json=body, **more)

    def idle(self, seconds=10.0):
        """Whether the worker has nothing left to do, after a while."""
        return within(seconds, lambda: not self.service.worker.running and not self.service.worker.waiting)


class _Server(uvicorn.Server):
    """One that tells its event loop."""

    async def startup(self, sockets=None):
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)


@contextmanager
def served(dec, **settings):
    """Serve ``dec`` for the length of the block."""
    service = Service(dec, Settings("tiny", **settings), Metrics())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(make_app(service), log_config=None, access_log=False, lifespan="off")
        server = _Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        service.worker.start()
        thread.start()
        running = Running(service, listener.getsockname()[1])
        assert within(10, lambda: server.started)
        running.loop = server.loop
        try:
            yield running
        finally:
            running.openai.close()
            running.http.close()
            service.worker.stop(0)
            server.should_exit = True
            thread.join(10)
            service.worker.join(10)


def served_by(make, **settings):
    """Two fixtures of a module: a decoder that ``make`` makes, and a server of it."""

    @pytest.fixture(scope="module")
    def dec():
        return make()

    @pytest.fixture(scope="module")
    def server(dec):
        with served(dec, **settings) as running:
            yield running

    return dec, server


def within(seconds, true):
    """Whether ``true()`` becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False
