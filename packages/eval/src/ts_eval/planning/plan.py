"""What a generation needs and how fast it can be at best: bytes held, bytes read per step, and their time.

Decoding one text at a time is bound by memory: a pass cannot be faster than reading the weights and the KV cache once.
That floor is what `steps` gives; computing, launching and sampling come on top.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import decoder
from decoder.drafters import FEWEST_TUNED, drafter_class, prompt_lookup
from decoder.heads import Heads
from decoder.parts import CacheForm, CostTuned, DraftLayer, DraftLayerCache, rank_paths
from ts_eval.comparing.method_spec import NEED_DRAFT_MODEL
from ts_eval.planning.floors import StepFloor
from ts_eval.planning.model_shape import CUDA, ModelShape

METHODS = (
    "ar", "auto", "tokenswift", "tokenswift-fused", "medusa", "draft-model", "triforce", "magicdec", "prompt-lookup",
)  # fmt: skip
"""The methods whose passes are known beforehand, with a tree that is given or the paper's; auto with heads."""
HELD = (*METHODS, "suffix", "eagle3")
"""The methods of which it is known what they hold."""
CHAIN = 32
"""Tokens that tokenswift-fused copies from the text at most."""


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
        """Expected tokens of a step in which a drafted token is right with ``acceptance`` where those before it were.

        So methods are compared as if all drafted equally well: a long chain is worth little more than a short one.
        """
        return sum(acceptance**level for level in range(self.depth + 1))


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
) -> MethodPlan:
    """The plan of one of `HELD`.

    ``heads_bytes`` are those of the ``heads`` draft heads, None for chained ones, and ``heads_cache`` those that they
    keep of the text. ``device`` is where passes run. Where ``options`` have no tree,
    methods that then choose one in each step get room for the widest; what they read depends on what they choose, and
    is told as of one level of heads.

    Passes per step, besides the verification: tokenswift one over weights, heads and partial cache; medusa and
    tokenswift-fused the heads and the language-model head; magicdec as many over weights and small cache as the tree
    has levels; triforce one over weights and partial cache, and one of the small model per further level;
    draft-model as many of the small model, whose cache holds the whole text, as the tree has levels;
    prompt-lookup none.

    Raises:
        ValueError: an unknown method, or draft-model or triforce without their small model.
    """
    if method not in HELD:
        raise ValueError(f"no plan is known for {method!r}: choose from {', '.join(HELD)}")
    heads_bytes = model.heads_bytes(heads) if heads_bytes is None else heads_bytes
    nodes, depth, draft_cache, drafter, draft_reads = _drafting(
        method, model, prompt_tokens, max_new_tokens, options, heads, heads_bytes, draft_model
    )
    # A text too short to be tuned takes less, and is planned as any other.
    if issubclass(tuned := drafter_class(method, options, max(max_new_tokens, FEWEST_TUNED)), CostTuned):
        nodes = tuned.max_nodes
    full_cache, host_cache = model.full_cache(prompt_tokens + max_new_tokens, CacheForm.of(options), device)
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
    """What draft heads keep of a text of so many tokens: draft layers keys and values, others nothing."""
    return DraftLayerCache.planned_bytes(heads, tokens) if isinstance(heads, DraftLayer) else 0


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
        if method == "auto" and draft_model is not None:  # asked in turn with heads; what it reads is not told
            drafter += draft_model.weight_bytes
            draft_cache = draft_model.cache_bytes(prompt_tokens + max_new_tokens)
    elif method == "magicdec":
        depth, nodes, draft_cache = levels, 1 + levels, model.cache_bytes(budget + levels)
        draft_reads = levels * (model.pass_bytes + draft_cache)
    elif method == "draft-model":
        small = _small_model(method, draft_model)
        # Of the candidates of a depth those behind the best one before.
        paths = [path for path in rank_paths(options.fixed_tree, levels) if not any(path[:-1])]
        depth, nodes, drafter = levels, 1 + len(paths), small.weight_bytes
        draft_cache = small.cache_bytes(prompt_tokens + max_new_tokens)
        draft_reads = levels * (small.pass_bytes + small.cache_bytes(prompt_tokens + max_new_tokens // 2))
    elif method == "triforce":
        small = _small_model(method, draft_model)
        small_cache = small.cache_bytes(options.draft_budget or budget)
        depth, nodes, drafter = levels, 1 + levels, small.weight_bytes
        draft_cache = model.cache_bytes(budget + levels) + small_cache
        draft_reads = model.pass_bytes + model.cache_bytes(budget + levels)
        draft_reads += (levels - 1) * (small.pass_bytes + small_cache)
    elif method == "prompt-lookup":
        depth, nodes = prompt_lookup.CHAIN, 1 + prompt_lookup.CHAIN
    return nodes, depth, draft_cache, drafter, draft_reads


def _small_model(method: str, draft_model: ModelShape | None) -> ModelShape:
    if draft_model is None:
        raise ValueError(f"a plan for {method} needs its small model")
    return draft_model


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
    device: torch.device = CUDA,
) -> dict:
    """Every method's `MethodPlan` with its floors, ready for JSON and tables.

    ``ms_per_step`` holds, per bandwidth [bytes per second], the least time of a step in the middle of the output, which
    is the mean over it, and at its end; of ``ar`` a step is a token. An offloaded cache is copied meanwhile, from the
    host, so a step takes at least as long as that. ``speedup`` holds, per acceptance, the floor of ar over the method's
    for one token, over the whole output, at the first bandwidth; unless the cache is offloaded it is the same at each.
    draft-model and triforce are left out without their small model.
    """
    methods: dict[str, Any] = {}
    whole = prompt_tokens + max_new_tokens
    half = (prompt_tokens + whole) / 2
    floor = StepFloor(model, CacheForm.of(options), bandwidths)
    first = next(iter(bandwidths))
    for name in METHODS:
        if name in NEED_DRAFT_MODEL and draft_model is None:
            continue
        made = plan_method(
            name, model, prompt_tokens, max_new_tokens, options, heads=heads, draft_model=draft_model, device=device
        )
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
