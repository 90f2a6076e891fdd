"""The Python of the documents, page by page, on the reference model with a few tokens."""

import functools
import inspect
import re
from pathlib import Path

import pytest

import decoder
from decoder.drafters import METHODS

from .decoder.serving import served, speaking_decoder

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
PAGES = [ROOT / "README.md", ROOT / "packages/decoder/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LENGTHS = re.compile(r"\b(?:1000|500|300|256|200)\b")


def code_of(page):
    """The page's blocks; of those that show a file, an example is taken, and a test has its own place."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        shown = re.match(r'--8<-- "(.*)"', block)
        if not shown:
            yield block
        elif shown[1].startswith("docs/examples/"):
            yield (ROOT / shown[1]).read_text(encoding="utf-8")


def loads_the_reference(model, *arguments, **settings):
    """`decoder.load` with the reference model in place of any other, with a chat template."""
    asked = inspect.signature(decoder.loader.load).bind(model, *arguments, **settings).arguments
    heads = DATA / "heads-gated" if asked.get("heads") else None
    settings = {name: asked[name] for name in ("dtype", "bitwise", "prefix_cache_bytes") if name in asked}
    return loaded(heads, **settings)


@functools.cache
def loaded(heads, **settings):
    dec = decoder.loader.load(DATA / "reference-model", heads, **settings)
    dec.tokenizer.chat_template = TEMPLATE
    return dec


@pytest.fixture(scope="module")
def server():
    with served(speaking_decoder(), max_tokens=500) as running:
        yield running


@pytest.mark.parametrize("page", [page for page in PAGES if any(code_of(page))], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, server, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(decoder, "load", loads_the_reference)
    chat = [{"role": "user", "content": "Describe a pilot as JSON."}]
    names = {"decoder": decoder, "prompt": "Call me", "prompts": ["Call me", "It was"], "messages": chat}
    names |= {"hook": lambda context, logits: logits, "dec": loads_the_reference("reference", heads="its own")}
    for number, block in enumerate(code_of(page)):
        code = LENGTHS.sub("8", block).replace("http://127.0.0.1:8000", server.url)
        code = code.replace('model="smollm2"', 'model="tiny"')
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)
    METHODS.pop("bigram", None)  # which the page on drafters adds
