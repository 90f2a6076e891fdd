"""A server that speaks OpenAI's protocol (vLLM, llama.cpp, `python -m decoder serve`), timed on the same prompts."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import decoder

CONNECT_SECONDS = 10
ANSWER_SECONDS = 1800
"""How long a server may be silent: the first piece of an answer comes behind the pass over a long prompt."""


@dataclass(frozen=True)
class Timing:
    """An answer in pieces of text.

    Attributes:
        tokens: how many tokens there were when each piece had come, if they are spread evenly over the pieces, of which
            most servers send one per token.
        prefill_seconds: to the first piece.
        seconds: from the first piece to each.
    """

    tokens: list[int]
    prefill_seconds: float
    seconds: list[float]


@dataclass(frozen=True)
class Endpoint:
    """A model of a server: the server's address, without /v1, and the model's name there."""

    url: str
    model: str

    @classmethod
    def find(cls, url: str, model: str) -> "Endpoint":
        """The model of the server at ``url`` that is called as the folder, file or hub id ``model`` is.

        Raises:
            OSError: nothing that speaks the protocol answers there.
            ValueError: the server has other models only, or ``url`` is no address.
        """
        root = root_of(url)
        with told(root), urllib.request.urlopen(f"{root}/v1/models", timeout=CONNECT_SECONDS) as answer:
            served = [str(each["id"]) for each in json.load(answer)["data"]]
        wanted = Path(model).resolve().name if Path(model).exists() else model
        found = next((name for name in served if called(name) == called(wanted)), None)
        if found is None:
            raise ValueError(
                f"the server at {root} has {', '.join(served) or 'no model'} and not {called(wanted)}: start it with "
                "the model that is compared, under its name (vLLM: --served-model-name, llama.cpp: --alias)"
            )
        return cls(root, found)

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, sampling: "decoder.SamplingParams", to_end: bool
    ) -> Timing:
        """Time a streamed completion of ``prompt`` (token ids), which with ``to_end`` may end before its length.

        Raises OSError where the server is gone, refuses, or tells no counts.
        """
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": not to_end,
            **_sampling_fields(sampling),
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        tokens, times = None, [time.perf_counter()]
        with told(self.url), urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            for event in _events(answer):
                if any(choice.get("text") for choice in event.get("choices") or ()):
                    times.append(time.perf_counter())
                if event.get("usage"):
                    tokens = int(event["usage"]["completion_tokens"])
        if tokens is None or len(times) < 2:
            raise OSError(f"the server at {self.url} gave no text, or did not count its tokens (usage)")
        asked_at, first, *_ = times
        pieces = len(times) - 1
        reached = [tokens * piece // pieces for piece in range(1, pieces + 1)]
        return Timing(reached, first - asked_at, [seen - first for seen in times[1:]])


def root_of(url: str) -> str:
    """A server's address without /v1. Raises ValueError for what is no address."""
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise ValueError(f"the endpoint {url} is no address such as http://127.0.0.1:8000")
    return root


def called(name: str) -> str:
    """The last part of a path or hub id, as names are compared."""
    return name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")


def _sampling_fields(sampling: "decoder.SamplingParams") -> dict[str, Any]:
    """The protocol's fields, and those of vLLM's names for what is switched on."""
    fields = {"temperature": float(sampling.temperature), "top_p": float(sampling.top_p), "seed": sampling.seed}
    off = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return fields | {name: getattr(sampling, name) for name in off if getattr(sampling, name) != off[name]}


def _events(answer) -> Iterator[dict[str, Any]]:
    """The server-sent events of an answer. Raises OSError for one that tells an error."""
    for line in answer:
        kind, _, data = line.decode().partition(":")
        if kind == "data" and data.strip() not in ("", "[DONE]"):
            event = json.loads(data)
            if "error" in event:
                raise OSError(_reason(event))
            yield event


@contextmanager
def told(url: str, fault: str = "does not speak OpenAI's protocol") -> Iterator[None]:
    """Turn what can go wrong with a server into an OSError that names it; ``fault`` is what an unknown answer shows."""
    try:
        yield
    except urllib.error.HTTPError as error:
        try:
            reason = _reason(json.load(error))
        except ValueError:
            reason = error.reason
        raise OSError(f"the server at {url} refused the request ({error.code}): {reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise OSError(f"the server at {url} does not answer ({reason}): is it running?") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(f"what answers at {url} {fault}") from error


def _reason(body: dict[str, Any]) -> str:
    """The words of an error's body."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
