"""An experiment with everything loaded: what was asked for is checked, then read, then loaded."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

import decoder
from decoder.drafters import METHODS
from decoder.parts import RepeatedLayer, dtype_name, eos_ids
from ts_eval import defaults
from ts_eval.comparing import checkpoints, llama_cpp
from ts_eval.comparing.data_dir import find_data_dir
from ts_eval.comparing.decoders import Sources, with_ar
from ts_eval.comparing.endpoint import Endpoint
from ts_eval.comparing.memory import resident_bytes
from ts_eval.comparing.method_spec import ENDPOINT, NEED_DRAFT_MODEL, MethodSpec
from ts_eval.comparing.prompts import SHIPPED, Prompt, is_hub_dataset, read_prompts, refuse_missing_prompts
from ts_eval.comparing.results import digest_of, environment
from ts_eval.planning import plan
from ts_eval.planning.model_shape import ModelShape

if TYPE_CHECKING:
    from ts_eval.compare import Experiment

_MOST = {"runs": 10**6, "processes": 1024}  # of which each one takes memory before anything is generated
_OF_SOME = ("methods", "heads", "draft_model", "weights", "options", "runs", "llama_cpp")
Pair = tuple[int, int]
"""(prompt, run), by index: what tells a generation of a row from the others."""


@dataclass(frozen=True)
class Turn:
    """A row's turn: the generations that it decodes together, and their place among the experiment's batches."""

    spec: MethodSpec
    pairs: tuple[Pair, ...]
    batch: int


@dataclass(frozen=True)
class Setup:
    """An experiment with everything loaded; mappings are by the row's name.

    ``memory_before`` is what the process held before the model came, nothing of what a CUDA device counts; with
    ``logprobs`` the log-probabilities of all tokens are kept, to be compared.
    """

    specs: list[MethodSpec]
    params: "list[decoder.SamplingParams]"
    options: "dict[str, decoder.TokenSwiftOptions]"
    prompts: list[Prompt]
    decoders: "dict[str, decoder.Decoder]"
    settings: dict
    environment: dict
    max_new_tokens: int
    batch: int
    memory_before: int
    eos_ids: set[int]
    logprobs: bool
    endpoint: Endpoint | None
    llama: "dict[str, llama_cpp.Package | llama_cpp.Server]"

    @property
    def model(self):
        return self.decoders["ar"].model

    @property
    def kv_dtype(self) -> str | None:
        """`decoder.TokenSwiftOptions.kv_dtype`, the same in all rows."""
        return self.options["ar"].kv_dtype

    @property
    def without_heads(self) -> list[str]:
        """The rows that could draft with heads and have none."""
        drafting = [spec.text for spec in self.specs if not spec.is_outside and METHODS[spec.name].heads_kinds]
        return [text for text in drafting if self.settings["heads"][text] is None]

    def settings_of_all(self) -> dict:
        """Of ``settings`` what decides the generations of every row, whichever rows and runs there are."""
        settings = {name: value for name, value in self.settings.items() if name not in _OF_SOME}
        return {**settings, "weights": self.settings["weights"][settings["model"]]}

    def settings_of_row(self, text: str) -> str:
        """A digest of what decides the generations of one row besides."""
        settings, spec = self.settings, MethodSpec.parse(text)
        paths = [settings["heads"][text], settings["draft_model"] if spec.name in NEED_DRAFT_MODEL else None]
        weights = [settings["weights"].get(path) for path in paths]
        content = {"options": settings["options"][text], "paths": paths, "weights": weights}
        if spec.is_llama:
            content["llama_cpp"] = settings["llama_cpp"][text]
        return digest_of(content)

    def stop_ids(self, prompt: int) -> set[int]:
        """Tokens that end a text behind a prompt, by its index: a chat's answer ends, a book goes on."""
        return self.eos_ids if self.prompts[prompt].chat else set()

    def batches(self) -> list[tuple[Pair, ...]]:
        """The generations of each row, run by run and prompt by prompt, in groups of ``batch``."""
        pairs = [(prompt, run) for run in range(len(self.params)) for prompt in range(len(self.prompts))]
        return [tuple(pairs[start : start + self.batch]) for start in range(0, len(pairs), self.batch)]

    def turns(self) -> Iterator[Turn]:
        """Every row takes its turn at every batch; their order rotates by one from run to run.

        Rows that are not decoded here take the generations of a batch one at a time.
        """
        per_run = max(1, len(self.prompts) // self.batch)
        for batch, pairs in enumerate(self.batches()):
            shift = batch // per_run % len(self.specs)
            for spec in self.specs[shift:] + self.specs[:shift]:
                for group in [(pair,) for pair in pairs] if spec.is_outside else [pairs]:
                    yield Turn(spec, group, batch)

    def planned_bytes(self, spec: MethodSpec) -> dict[str, int | None]:
        """What the row's largest batch should hold by `plan.plan_method`: in all, and above the loaded models.

        None for a method without a plan.
        """
        names = ("planned_memory_bytes", "planned_memory_above_model_bytes")
        if spec.name not in plan.HELD:
            return dict.fromkeys(names)
        dec = self.decoders[spec.text]
        heads = next(iter(dec.heads.values()), None)
        levels = 0 if heads is None else heads.num_heads
        if isinstance(heads, RepeatedLayer):
            levels = self.options[spec.text].depth
        longest = max(len(prompt.token_ids) for prompt in self.prompts)
        made = plan.plan_method(
            spec.name,
            ModelShape.of(dec.model).shared(dec.target.ranks.size),
            longest,
            self.max_new_tokens,
            self.options[spec.text],
            heads=levels,
            heads_bytes=0 if heads is None else sum(weight.nbytes for weight in heads.parameters()),
            heads_cache=plan.heads_cache(heads, longest + self.max_new_tokens),
            draft_model=ModelShape.of(dec.draft_model) if dec.draft_model is not None else None,
            device=dec.target.device,
        )
        above = len(self.batches()[0]) * (made.full_cache + made.draft_cache + made.tree + made.logits)
        if dec.target.device.type == "cpu":
            above += len(self.batches()[0]) * made.host_cache
        return dict(zip(names, (made.weights + made.drafter + above, above), strict=True))


def _refuse_out_of_range(experiment: "Experiment") -> None:
    for name in ("max_new_tokens", "runs", "num_prompts", "prompt_tokens", "processes", "batch"):
        value, most = getattr(experiment, name), _MOST.get(name, float("inf"))
        if value is not None and not 1 <= value <= most:
            words = "at least 1" if name not in _MOST else f"at least 1 and at most {most:,}"
            raise ValueError(f"{name} must be {words}, not {value}")


def set_up(experiment: "Experiment") -> Setup:
    """Check what was asked for, read the prompts and load the model. Raises as `Experiment.run`."""
    specs = _rows(experiment)
    _refuse_out_of_range(experiment)
    sampling = {**defaults.SAMPLING, **(experiment.sampling or {})}
    params = [decoder.SamplingParams(**sampling, seed=experiment.seed + run) for run in range(experiment.runs)]
    for_all = experiment.options or {}
    options = {spec.text: decoder.TokenSwiftOptions(**{**for_all, **spec.options}) for spec in specs}
    sources = Sources.find(specs, experiment.model, experiment.heads, experiment.draft_model, experiment.data_dir)
    prompts, prompt_tokens, num_prompts = _which_prompts(experiment)
    checkpoints.refuse_missing("embedding model", experiment.embedding_model)
    refuse_missing_prompts(prompts)
    sources.refuse_missing(specs)
    llama = llama_cpp.find_servers(specs, sources.model, sources.draft_model, params[0])
    endpoint = Endpoint.find(experiment.endpoint, sources.model) if experiment.endpoint else None

    memory_before = resident_bytes()
    sources = replace(sources, tensor_parallel=experiment.tensor_parallel, yarn=experiment.yarn)
    decoders = sources.load(_device(experiment), experiment.dtype, experiment.bitwise)
    backbone = decoders[None].model
    sanitize = experiment.sanitize_control_tokens
    texts = read_prompts(prompts, decoders[None].tokenizer, prompt_tokens, num_prompts, sanitize)
    _refuse_too_long(texts, experiment.max_new_tokens, backbone.config.max_position_embeddings)
    llama |= _load_llama(specs, sources, params[0], backbone.device, texts, experiment.max_new_tokens)
    settings = {
        **_settings_of_rows(specs, sources, options),
        **_settings_of_prompts(prompts, prompt_tokens, texts),
        "max_new_tokens": experiment.max_new_tokens,
        "runs": experiment.runs,
        "seed": experiment.seed,
        "batch": experiment.batch,
        "processes": experiment.processes,
        "endpoint": experiment.endpoint,
        "dtype": dtype_name(backbone),
        "bitwise": decoders[None].bitwise,
        "computed_by": decoders[None].target.backend.computed_by(),
        "sampling": {name: value for name, value in asdict(params[0]).items() if name != "seed"},
        "options_for_all": asdict(decoder.TokenSwiftOptions(**for_all)),
    }
    if experiment.yarn is not None:
        settings["yarn"] = experiment.yarn
    if llama:
        settings["llama_cpp"] = {text: engine.version for text, engine in llama.items()}
    if (size := decoders[None].target.ranks.size) > 1:
        settings["tensor_parallel_size"] = size
    return Setup(
        specs=specs,
        params=params,
        options=options,
        prompts=texts,
        decoders={spec.text: decoders[sources.heads.get(spec.text)] for spec in specs},
        settings=json.loads(json.dumps(settings)),
        environment=environment(backbone.device, experiment.arguments),
        max_new_tokens=experiment.max_new_tokens,
        batch=experiment.batch,
        memory_before=memory_before if backbone.device.type == "cpu" else 0,
        eos_ids=eos_ids(backbone, decoders[None].tokenizer),
        logprobs=experiment.audit,
        endpoint=endpoint,
        llama=llama,
    )


def _load_llama(
    specs: Sequence[MethodSpec],
    sources: Sources,
    sampling: "decoder.SamplingParams",
    device: torch.device,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
) -> "dict[str, llama_cpp.Package | llama_cpp.Server]":
    """What generates the texts of the rows of llama.cpp's package, with as many threads as ours have."""
    loading = llama_cpp.Loading(
        sources.model,
        sources.draft_model,
        torch.get_num_threads(),
        max(len(prompt.token_ids) for prompt in prompts) + max_new_tokens,
        sampling.penalty_window,
        device.type == "cuda",
    )
    return {spec.text: loading.engine(spec) for spec in specs if spec.is_llama and spec.endpoint is None}


def _rows(experiment: "Experiment") -> list[MethodSpec]:
    """The rows of an experiment, the server's last."""
    methods = [method for method in experiment.methods if method != ENDPOINT]
    if experiment.endpoint is None and len(methods) < len(experiment.methods):
        raise ValueError(f"{ENDPOINT} is the row of a server: name it with --endpoint URL")
    specs = with_ar([*methods, *([ENDPOINT] if experiment.endpoint else [])])
    if experiment.yarn is not None and any(spec.is_llama for spec in specs):
        raise ValueError("llama.cpp runs the file as it is: leave out its rows, or --yarn")
    if experiment.processes > 1 and any(spec.name == ENDPOINT or spec.endpoint for spec in specs):
        raise ValueError("a server is timed one request at a time: leave out --processes, or --endpoint")
    return specs


def _which_prompts(experiment: "Experiment") -> tuple[str, int | None, int | None]:
    """The file or dataset of the prompts, how many tokens are taken of each, and of how many."""
    prompts, prompt_tokens, num_prompts = experiment.prompts, experiment.prompt_tokens, experiment.num_prompts
    if prompts is None:
        prompts = str(find_data_dir(experiment.data_dir) / SHIPPED)
    if experiment.prompts is None or is_hub_dataset(prompts):
        prompt_tokens, num_prompts = prompt_tokens or defaults.BOOK_TOKENS, num_prompts or 1
    return prompts, prompt_tokens, num_prompts


def _device(experiment: "Experiment") -> str:
    if experiment.processes > 1 and experiment.device in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{(experiment.rank or 0) % torch.cuda.device_count()}"
    return experiment.device


def _refuse_too_long(prompts: Sequence[Prompt], max_new_tokens: int, positions: int) -> None:
    for prompt in prompts:
        if len(prompt.token_ids) + max_new_tokens > positions:
            raise ValueError(
                f"the prompt {prompt.name!r} ({len(prompt.token_ids):,} tokens) and {max_new_tokens:,} new "
                f"tokens are beyond the model's {positions:,} positions"
            )


def _settings_of_rows(
    specs: Sequence[MethodSpec], sources: Sources, options: "dict[str, decoder.TokenSwiftOptions]"
) -> dict:
    return {
        "methods": [spec.text for spec in specs],
        "model": sources.model,
        "heads": {spec.text: sources.heads.get(spec.text) for spec in specs},
        "draft_model": sources.draft_model,
        "weights": sources.weights(),
        "options": {text: asdict(option) for text, option in options.items()},
    }


def _settings_of_prompts(source: str, prompt_tokens: int | None, prompts: Sequence[Prompt]) -> dict:
    token_ids = [prompt.token_ids for prompt in prompts]
    return {
        "prompts": source,
        "prompt_tokens": prompt_tokens,
        "prompt_names": [prompt.name for prompt in prompts],
        "prompt_lengths": list(map(len, token_ids)),
        "prompts_to_end": [prompt.chat for prompt in prompts],
        "prompt_digest": hashlib.sha256(str(token_ids).encode()).hexdigest()[:16],
        "num_prompts": len(prompts),
    }
