"""llama.cpp on the same GGUF file: through the package llama-cpp-python, or a llama-server by its own protocol."""

import importlib
import json
import urllib.request
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import decoder
from decoder.parts import is_gguf
from ts_eval.comparing.endpoint import ANSWER_SECONDS, CONNECT_SECONDS, called, root_of, told
from ts_eval.comparing.generation import OnStep, StepClock
from ts_eval.comparing.method_spec import LLAMA_CPP, LLAMA_DRAFT_MODEL, LLAMA_LOOKUP, MethodSpec

DRAFTED = 4
"""Tokens that a small model drafts for one pass of the large one; the package leaves that number to its user."""
SPARE_TOKENS = 32
"""Room behind the longest text for what is drafted there."""
_NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Fields of `decoder.SamplingParams`, and what the package calls them."""
_TOLD_OTHERWISE = ("seed", "penalty_window")
_RANDOM_SEED = 0xFFFFFFFF
"""What stands for any seed in llama.cpp."""


def find_servers(
    specs: Sequence[MethodSpec], model: str, draft_model: str | None, sampling: "decoder.SamplingParams"
) -> "dict[str, Package | Server]":
    """Row -> llama-server, of those that name one; llama.cpp's rows that cannot run are refused, before any is loaded.

    Raises:
        ValueError: another model than a GGUF file, a missing package, or sampling that llama.cpp does not have.
        OSError, ValueError: as `Server.find`.
    """
    rows = [spec for spec in specs if spec.is_llama]
    if not rows:
        return {}
    read = [model, *([draft_model] if any(spec.name == LLAMA_DRAFT_MODEL for spec in rows) else [])]
    other = next((path for path in read if not is_gguf(str(path))), None)
    if other is not None:
        raise ValueError(f"llama.cpp reads GGUF files, and {other} is none: name a .gguf file, or leave out its rows")
    usual, given = asdict(decoder.SamplingParams()), asdict(sampling)
    unknown = [name for name in given if name not in (*_NAMES, *_TOLD_OTHERWISE) and given[name] != usual[name]]
    if unknown:
        raise ValueError(f"llama.cpp's rows have no {unknown[0]}: leave it out, or these rows")
    if any(spec.endpoint is None for spec in rows):
        package()
    return {spec.text: Server.find(spec.endpoint, model) for spec in rows if spec.endpoint is not None}


def package() -> Any:
    """The module of llama-cpp-python. Raises ValueError that tells how to get it."""
    try:
        return importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        # A shared library that does not load raises the latter two.
        raise ValueError(
            f"the row {LLAMA_CPP} needs the package llama-cpp-python ({error}): pip install "
            f"'tokenswift-eval[llama-cpp]', or name a llama-server, {LLAMA_CPP}:endpoint=URL"
        ) from error


@dataclass(frozen=True)
class Loading:
    """What the package's models are loaded with: the two files, the number of threads, the tokens of the longest text,
    the penalty's window, and whether layers go to a GPU, for which the package must have been built."""

    model: str
    draft_model: str | None
    threads: int
    tokens: int
    penalty_window: int
    gpu: bool

    def engine(self, spec: MethodSpec) -> "Package":
        """What generates a row's texts. Raises ValueError where a file cannot be loaded."""
        drafts: _Drafts | None = None
        if spec.name == LLAMA_LOOKUP:
            speculative = importlib.import_module("llama_cpp.llama_speculative")
            drafts = _Drafts(speculative.LlamaPromptLookupDecoding())
        elif spec.name == LLAMA_DRAFT_MODEL:
            drafts = _Drafts(_SmallModel(self._load(str(self.draft_model))))
        return Package(self._load(self.model, draft_model=drafts), drafts)

    def _load(self, path: str, **named) -> Any:
        try:
            return package().Llama(
                path,
                n_ctx=self.tokens + SPARE_TOKENS,
                n_threads=self.threads,
                n_threads_batch=self.threads,
                n_gpu_layers=-1 if self.gpu else 0,
                last_n_tokens_size=self.penalty_window,
                flash_attn=True,  # as llama-server has it where nothing else is said
                verbose=False,
                **named,
            )
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"llama.cpp cannot load {path}: {error}") from error


class _Drafts:
    """A draft model of the package, told apart by passes: it is asked once behind each of them."""

    def __init__(self, draft: Any):
        self.draft, self.drafted = draft, 0
        self.on_pass = lambda: None

    def __call__(self, input_ids: np.ndarray, /, **named) -> np.ndarray:
        self.on_pass()
        tokens = self.draft(input_ids, **named)
        self.drafted += len(tokens)
        return tokens


class _SmallModel:
    """Drafts `DRAFTED` tokens greedily with a small model, in the form of the package's own draft models."""

    def __init__(self, llama: Any):
        self._llama = llama

    def read(self, prompt: Sequence[int]) -> None:
        self._llama.reset()
        self._llama.eval(prompt)

    def __call__(self, input_ids: np.ndarray, /, **named) -> np.ndarray:
        with closing(self._llama.generate(input_ids.tolist(), temp=0.0)) as stream:
            return np.array(list(islice(stream, DRAFTED)), dtype=np.intc)


class Package:
    """A model of the package, with what drafts for it, if anything does."""

    def __init__(self, llama: Any, drafts: _Drafts | None = None):
        self._llama, self._drafts = llama, drafts
        self.version = f"llama-cpp-python {package().__version__}"

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: "decoder.SamplingParams",
        stop_ids: Collection[int],
        on_step: OnStep,
    ) -> None:
        """Generate behind ``prompt`` to a length or one of ``stop_ids``; the noise is llama.cpp's own sequence."""
        llama, drafts = self._llama, self._drafts
        tokens: list[int] = []
        told = 0
        clock = StepClock(on_step)
        # Nothing of the prompt is taken over from the text before.
        llama.reset()
        llama.set_seed(sampling.seed % _RANDOM_SEED)
        counts: dict[str, int] = {}

        def end_step() -> None:
            nonlocal told
            if drafts is not None:
                counts["drafted"] = drafts.drafted
                counts["accepted"] = counts.get("accepted", 0) + len(tokens) - told - 1
            clock.step(tokens[told:], **counts)
            told = len(tokens)

        if drafts is not None:
            drafts.drafted, drafts.on_pass = 0, end_step
            if isinstance(drafts.draft, _SmallModel):
                drafts.draft.read(prompt)
        settings = {theirs: getattr(sampling, ours) for ours, theirs in _NAMES.items()}
        with closing(llama.generate(list(prompt), **settings)) as stream:
            for token in stream:
                tokens.append(int(token))
                ended = len(tokens) == max_new_tokens or token in stop_ids
                if drafts is None or ended:
                    end_step()
                if ended:
                    return

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [vocabulary], behind ``tokens``."""
        self._llama.reset()
        self._llama.eval(list(tokens))
        pointer = package().llama_get_logits_ith(self._llama.ctx, -1)
        return np.ctypeslib.as_array(pointer, (self._llama.n_vocab(),)).copy()


@dataclass(frozen=True)
class Server:
    """A llama-server: its address and build."""

    url: str
    version: str

    @classmethod
    def find(cls, url: str, model: str) -> "Server":
        """The llama-server at ``url``.

        Raises:
            OSError: nothing answers there, or no llama-server.
            ValueError: it has another file than one called as ``model`` is, or ``url`` is no address.
        """
        root = root_of(url)
        with (
            told(root, "is no llama-server"),
            urllib.request.urlopen(f"{root}/props", timeout=CONNECT_SECONDS) as answer,
        ):
            props = json.load(answer)
            version, served = f"llama.cpp {props['build_info']}", str(props["model_path"])
        wanted = Path(model).resolve().name
        if called(served) != called(wanted):
            raise ValueError(
                f"the llama-server at {root} has {called(served)} and not {called(wanted)}: start it with that"
            )
        return cls(root, version)

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: "decoder.SamplingParams",
        stop_ids: Collection[int],
        on_step: OnStep,
    ) -> None:
        """As `Package.generate`; with ``stop_ids`` the text ends where the server ends it, else no end is drawn.

        The times are the server's own. It is asked for the text at once, since in pieces it leaves out the ids of
        characters' parts; so its time is spread evenly over the tokens.
        """
        body = {
            "prompt": list(prompt),
            "n_predict": max_new_tokens,
            "seed": sampling.seed % _RANDOM_SEED,
            "repeat_last_n": sampling.penalty_window,
            "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
            "ignore_eos": not stop_ids,
            "cache_prompt": False,
            "return_tokens": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
        }
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        # A text that comes at once takes as long as all of its tokens.
        timeout = ANSWER_SECONDS + max_new_tokens
        with told(self.url, "is no llama-server"), urllib.request.urlopen(request, timeout=timeout) as answer:
            content = json.load(answer)
            tokens, timings = [int(token) for token in content["tokens"]], content["timings"]
            prefill, decode = timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000
            drafted, accepted = timings.get("draft_n"), timings.get("draft_n_accepted")
        if not tokens:
            raise OSError(f"the server at {self.url} gave no tokens")
        counts = {} if drafted is None else {"steps": len(tokens) - accepted, "drafted": drafted, "accepted": accepted}
        clock = StepClock(on_step)
        for place, token in enumerate(tokens):
            last = place == len(tokens) - 1
            clock.step([token], decode / (len(tokens) - 1) if place else prefill, **(counts if last else {}))
