"""What a generation needs and how fast it can be at best: bytes held, bytes read per step, and their time.

Decoding one text at a time is bound by memory: a pass cannot be faster than reading the weights and the KV cache once.
That floor is what `steps` gives; computing, launching and sampling come on top.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

import decoder
from decoder.cache.form import CacheForm
from decoder.drafters import drafter_class, prompt_lookup
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.eagle3.draft_model import Eagle3DraftModel
from decoder.eagle3.text_cache import Eagle3TextCache
from decoder.heads import Heads
from decoder.model import loading
from decoder.model.gguf import is_gguf
from decoder.parallel.sharding import refuse_unshareable, shared_parameters
from decoder.sampling.token_tree import rank_paths
from ts_eval.checkpoints import named, refuse_missing
from ts_eval.floors import StepFloor

METHODS = ("ar", "tokenswift", "tokenswift-fused", "medusa", "triforce", "magicdec", "prompt-lookup")
"""The methods whose passes are known beforehand, with a tree that is given or the paper's."""
HELD = (*METHODS, "auto", "suffix", "eagle3")
"""The methods of which it is known what they hold."""
CONFIGS = Path(__file__).parent / "configs"
"""Configurations of published models as far as they decide shapes, by name: llama-3.1-8b and others."""
CHAIN = 32
"""Tokens that tokenswift-fused copies from the text at most."""


CUDA = torch.device("cuda")


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its bytes.

    Attributes:
        parameters: all of them, tied ones once; what is held in fewer bytes counts as so many fewer numbers.
        read_parameters: those that one pass reads: all but an input embedding of its own, of which it takes a row.
        lm_head_parameters: the language-model head's.
        layers, kv_heads, head_dim, hidden_size, vocab_size: as in the configuration.
        value_bytes: of one number.
        shared_parameters: those of which each of several processes would hold a part.
    """

    parameters: int
    read_parameters: int
    lm_head_parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    value_bytes: int
    shared_parameters: int = 0

    @classmethod
    def of(cls, model, dtype: torch.dtype | None = None) -> "ModelShape":
        """Of a loaded model, or of one on the meta device; ``dtype`` where it shall be held in another."""
        config = model.config.get_text_config()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        value_bytes = (dtype or head.dtype).itemsize
        sizes = {name: one.numel() if dtype else one.nbytes // value_bytes for name, one in model.named_parameters()}
        parameters = sum(sizes.values())
        heads = config.num_attention_heads
        return cls(
            parameters=parameters,
            read_parameters=parameters - (0 if head is embedding else embedding.numel()),
            lm_head_parameters=head.numel(),
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden_size=config.hidden_size,
            vocab_size=head.shape[0],
            value_bytes=value_bytes,
            shared_parameters=sum(sizes[name] for name in shared_parameters(sizes, model.tp_plan or {})),
        )

    def shared(self, size: int) -> "ModelShape":
        """What one of ``size`` processes holds under transformers' plan; drafters and logits are whole in each."""

        def share(numbers: int) -> int:
            return -(-numbers // size)

        parameters = self.parameters - self.shared_parameters + share(self.shared_parameters)
        return replace(
            self,
            parameters=parameters,
            read_parameters=parameters - share(self.parameters - self.read_parameters),
            lm_head_parameters=share(self.lm_head_parameters),
            kv_heads=share(self.kv_heads),
            shared_parameters=share(self.shared_parameters),
        )

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.value_bytes

    @property
    def pass_bytes(self) -> int:
        """Weights that one pass reads."""
        return self.read_parameters * self.value_bytes

    def cache_bytes(self, tokens: int) -> int:
        """Keys and values of ``tokens`` positions, e.g. 2 x 32 layers x 102,400 x 8 x 128 x 2 bytes = 13.4 GB."""
        return 2 * self.layers * tokens * self.kv_heads * self.head_dim * self.value_bytes

    def full_cache(self, tokens: int, form: CacheForm, device: torch.device = CUDA, spare: int = 0) -> tuple[int, int]:
        """Bytes of a full cache of that form, on the device and in host memory.

        ``spare`` are slots behind the text in the buffers that passes look at.
        """
        kept, layers = self.kept_bytes(tokens + spare * form.plain, form), form.working_layers(device)
        working = self.cache_bytes(tokens + spare) * layers // self.layers
        if not form.offload:
            return kept + working, 0
        # Codes arrive on the device before they are restored there.
        arriving = kept * layers // self.layers if form.kv_dtype and device.type != "cpu" else 0
        return working + arriving, kept

    def kept_bytes(self, tokens: int, form: CacheForm) -> int:
        """Keys and values of ``tokens`` positions as a cache of that form keeps them."""
        return 2 * self.layers * tokens * self.kv_heads * form.vector_bytes(self.head_dim, self.value_bytes)

    def heads_bytes(self, heads: int) -> int:
        """That many chained draft heads: one square matrix and two norms each."""
        return heads * (self.hidden_size**2 + 2 * self.hidden_size) * self.value_bytes


@dataclass(frozen=True)
class MethodPlan:
    """A method's bytes for one generation, and what it reads per step.

    Attributes:
        nodes: the widest tree, root included; 1 for plain decoding.
        depth: drafted tokens on its longest path, of tokenswift-fused on the heads' part of it.
        weights: the model's.
        full_cache: keys and values of prompt and output, as far as they are on the device.
        draft_cache: the draft pass's keys and values; 0 when it has none.
        drafter: draft heads, or the small model.
        tree: keys, values and mask of the tree under verification.
        logits: the verification's.
        draft_reads: bytes that drafting reads per step.
        verify_weights: weights that the verification reads per step; the cache so far comes on top.
        host_cache: keys and values in host memory, of an offloaded cache.
    """

    nodes: int
    depth: int
    weights: int
    full_cache: int
    draft_cache: int
    drafter: int
    tree: int
    logits: int
    draft_reads: int
    verify_weights: int
    host_cache: int = 0

    @property
    def total(self) -> int:
        """Bytes held at the end of the generation; activations and buffers of the allocator come on top."""
        return self.weights + self.full_cache + self.draft_cache + self.drafter + self.tree + self.logits

    def step_bytes(self, cache_bytes: float) -> float:
        """Bytes that one step reads when the full cache holds ``cache_bytes``."""
        return self.draft_reads + self.verify_weights + cache_bytes

    def tokens_per_step(self, acceptance: float) -> float:
        """Expected tokens of a step that accepts the share ``acceptance`` (alpha) of its drafted tokens."""
        return 1 + acceptance * self.depth


def plan_method(
    method: str,
    model: ModelShape,
    prompt_tokens: int,
    max_new_tokens: int,
    options: "decoder.TokenSwiftOptions",
    *,
    heads: int = 3,
    heads_bytes: int | None = None,
    heads_cache: int = 0,
    draft_model: ModelShape | None = None,
    device: torch.device = CUDA,
    spare: int = 0,
) -> MethodPlan:
    """The plan of one of `HELD`.

    ``heads_bytes`` are those of the ``heads`` draft heads, None for chained ones, and ``heads_cache`` those that they
    keep of the text. ``device`` is where passes run, and ``spare`` the target's own. Where ``options`` have no tree,
    methods that then choose one in each step get room for the widest; what they read depends on what they choose, and
    is told as of one level of heads.

    Passes per step, besides the verification: tokenswift one over weights, heads and partial cache; medusa and
    tokenswift-fused the heads and the language-model head; magicdec as many over weights and small cache as the tree
    has levels; triforce one over weights and partial cache, and one of the small model per further level;
    prompt-lookup none.

    Raises:
        ValueError: an unknown method, or triforce without its small model.
    """
    if method not in HELD:
        raise ValueError(f"no plan is known for {method!r}: choose from {', '.join(HELD)}")
    heads_bytes = model.heads_bytes(heads) if heads_bytes is None else heads_bytes
    nodes, depth, draft_cache, drafter, draft_reads = _drafting(
        method, model, prompt_tokens, max_new_tokens, options, heads, heads_bytes, draft_model
    )
    if issubclass(tuned := drafter_class(method, options), CostTuned):
        nodes = tuned.max_nodes
    full_cache, host_cache = model.full_cache(prompt_tokens + max_new_tokens, CacheForm.of(options), device, spare)
    return MethodPlan(
        nodes=nodes,
        depth=depth,
        weights=model.weight_bytes,
        full_cache=full_cache,
        draft_cache=draft_cache + heads_cache,
        drafter=drafter,
        tree=model.cache_bytes(nodes) + nodes * nodes,
        logits=nodes * model.vocab_size * model.value_bytes,
        draft_reads=draft_reads,
        verify_weights=model.pass_bytes,
        host_cache=host_cache,
    )


def heads_cache(heads: Heads | None, tokens: int) -> int:
    """What draft heads keep of a text of so many tokens: EAGLE-3 keys and values, others nothing."""
    return Eagle3TextCache.planned_bytes(heads, tokens) if isinstance(heads, Eagle3DraftModel) else 0


def _drafting(
    method: str,
    model: ModelShape,
    prompt_tokens: int,
    max_new_tokens: int,
    options: "decoder.TokenSwiftOptions",
    heads: int,
    heads_bytes: int,
    draft_model: ModelShape | None,
) -> tuple[int, int, int, int, int]:
    """Nodes and depth of the tree, and the bytes of the draft cache, of the drafter, and read for drafts per step."""
    budget = options.budget_for(prompt_tokens)
    levels = min(options.depth, max(max_new_tokens, 1))
    nodes, depth, draft_cache, drafter, draft_reads = 1, 0, 0, 0, 0
    if method == "tokenswift":
        depth, drafter = min(levels, heads + 1), heads_bytes
        nodes = 1 + len(rank_paths(options.fixed_tree, depth)) + options.retrieved_ngrams * (heads + 1)
        draft_cache = 0 if options.cache == "full" else model.cache_bytes(budget + 1)
        # With cache="full" the draft pass reads the whole text's pairs: at least those of the prompt.
        read = model.cache_bytes(prompt_tokens) if options.cache == "full" else draft_cache
        draft_reads = model.pass_bytes + drafter + read
    elif method in ("medusa", "tokenswift-fused", "auto", "suffix", "eagle3"):
        depth, drafter = levels if method == "eagle3" else min(levels, heads), heads_bytes
        nodes = 1 + len(rank_paths(options.fixed_tree, depth)) + (CHAIN if method == "tokenswift-fused" else 0)
        draft_reads = drafter + model.lm_head_parameters * model.value_bytes if drafter else 0
    elif method == "magicdec":
        depth, nodes, draft_cache = levels, 1 + levels, model.cache_bytes(budget + levels)
        draft_reads = levels * (model.pass_bytes + draft_cache)
    elif method == "triforce":
        if draft_model is None:
            raise ValueError("a plan for triforce needs its small model")
        small_cache = draft_model.cache_bytes(options.draft_budget or budget)
        depth, nodes, drafter = levels, 1 + levels, draft_model.weight_bytes
        draft_cache = model.cache_bytes(budget + levels) + small_cache
        draft_reads = model.pass_bytes + model.cache_bytes(budget + levels)
        draft_reads += (levels - 1) * (draft_model.pass_bytes + small_cache)
    elif method == "prompt-lookup":
        depth, nodes = prompt_lookup.CHAIN, 1 + prompt_lookup.CHAIN
    return nodes, depth, draft_cache, drafter, draft_reads


def plan(
    model: ModelShape,
    prompt_tokens: int,
    max_new_tokens: int,
    options: "decoder.TokenSwiftOptions",
    *,
    heads: int = 3,
    draft_model: ModelShape | None = None,
    bandwidths: dict[str, float],
    acceptances: Sequence[float],
) -> dict:
    """Every method's `MethodPlan` with its floors, ready for JSON and tables.

    ``ms_per_step`` holds, per bandwidth [bytes per second], the least time of a step in the middle of the output, which
    is the mean over it, and at its end; of ``ar`` a step is a token. An offloaded cache is copied meanwhile, from the
    host, so a step takes at least as long as that. ``speedup`` holds, per acceptance, the floor of ar over the method's
    for one token, over the whole output, at the first bandwidth; unless the cache is offloaded it is the same at each.
    triforce is left out without its small model.
    """
    methods: dict[str, Any] = {}
    whole = prompt_tokens + max_new_tokens
    half = (prompt_tokens + whole) / 2
    floor = StepFloor(model, CacheForm.of(options), bandwidths)
    first = next(iter(bandwidths))
    for name in METHODS:
        if name == "triforce" and draft_model is None:
            continue
        made = plan_method(name, model, prompt_tokens, max_new_tokens, options, heads=heads, draft_model=draft_model)
        ar = methods["ar"]["ms_per_step"][first]["mean"] if methods else 1000 * floor.seconds(made, half, first)
        methods[name] = {
            "nodes": made.nodes,
            "depth": made.depth,
            "bytes": {
                "weights": made.weights,
                "full_cache": made.full_cache,
                "draft_cache": made.draft_cache,
                "drafter": made.drafter,
                "tree": made.tree,
                "logits": made.logits,
                "total": made.total,
                "host_cache": made.host_cache,
            },
            "bytes_read_per_step": {"mean": floor.read(made, half), "end": floor.read(made, whole)},
            "bytes_copied_per_step": {"mean": floor.copied(half), "end": floor.copied(whole)},
            "ms_per_step": {
                place: {
                    "mean": 1000 * floor.seconds(made, half, place),
                    "end": 1000 * floor.seconds(made, whole, place),
                }
                for place in bandwidths
            },
            "speedup": {
                f"{acceptance:g}": ar * made.tokens_per_step(acceptance) / (1000 * floor.seconds(made, half, first))
                for acceptance in acceptances
            },
        }
    return {
        "prompt_tokens": prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "partial_cache_slots": options.budget_for(prompt_tokens),
        "bandwidths": bandwidths,
        "methods": methods,
    }


def read_shape(model: str, dtype: str = "auto", processes: int = 1) -> ModelShape:
    """The shape of what `read_config` takes, without its weights, or the share of one of several processes.

    Args:
        dtype: "auto" is the configuration's, bfloat16 when it names none.

    Raises:
        OSError: there is no such configuration.
        ValueError: the configuration cannot be read or is of no causal language model, or so many processes cannot
            share the model.
    """
    config = read_config(model)
    if processes > 1:
        refuse_unshareable(config, processes)
    with torch.device("meta"):
        return ModelShape.of(AutoModelForCausalLM.from_config(config), held_dtype(config, dtype)).shared(processes)


def held_dtype(config: PreTrainedConfig, dtype: str) -> torch.dtype:
    """``dtype``, where "auto" is the configuration's, or bfloat16 when it names none. Raises ValueError."""
    if dtype == "auto":
        return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    held = getattr(torch, dtype, None)
    if not isinstance(held, torch.dtype) or not held.is_floating_point:
        raise ValueError(f"unknown dtype {dtype!r} here: use 'auto', 'float32', 'bfloat16', 'float16' or 'float64'")
    return held


def read_config(model: str) -> PreTrainedConfig:
    """The configuration of a model folder, GGUF file or hub id, in a file, or of one of `CONFIGS`.

    Raises:
        OSError: there is no such configuration.
        ValueError: it cannot be read.
    """
    shipped = CONFIGS / f"{model}.json"
    if not Path(model).exists() and shipped.parent == CONFIGS and shipped.is_file():
        model = str(shipped)
    if is_gguf(model):
        return loading.read_config(model)
    if not Path(model).is_file():
        try:
            refuse_missing("model", model)
        except FileNotFoundError as error:
            names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
            raise FileNotFoundError(f"{error}; configurations known by name are {names}") from error
        with named(model):
            return AutoConfig.from_pretrained(model)
    try:
        return AutoConfig.for_model(**json.loads(Path(model).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{model} is no model configuration (a JSON object with a model_type)") from error
