"""`ts-eval plan`: a plan from what the command line names, and its tables."""

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from rich.console import RenderableType
from rich.filesize import decimal

import decoder
from decoder.options import PAPER_TREE
from decoder.parts import QUANTISED_DTYPES, CacheForm, dtype_around
from ts_eval.commands.terminal import Columns
from ts_eval.comparing.data_dir import DRAFT_MODEL, REFERENCE_MODEL, find_data_dir
from ts_eval.planning.floors import GPUS
from ts_eval.planning.model_shape import ModelShape, read_config, read_shape
from ts_eval.planning.plan import plan, plan_method
from ts_eval.report.table import NONE, number, times, tree_in_words

ACCEPTANCES = (0.5, 0.7, 0.9)
MEMORIES = (16, 24, 48, 80)
"""GB of the devices for which the longest text is told."""
SHARE = 0.9
"""Of a device's memory; the rest is left to activations and to what the allocator keeps."""
FORMS = {
    "on the device": CacheForm(),
    "on the device, int8 or fp8": CacheForm("int8"),
    "in host memory": CacheForm(None, True),
    "in host memory, int8 or fp8": CacheForm("int8", True),
}
"""The ways to keep the full cache, by what they are called in tables."""


def plan_from(
    model: str | None,
    draft_model: str | None,
    max_new_tokens: int,
    prompt_tokens: int,
    dtype: str,
    num_heads: int,
    tree: tuple | None,
    ngrams: int | None,
    budget: int,
    gpu: Sequence[str],
    bandwidth: float | None,
    measure: bool,
    acceptance: Sequence[float],
    data_dir: str | None,
    tensor_parallel_size: int = 1,
    offload: bool = False,
    kv_dtype: str | None = None,
) -> dict:
    """`plan.plan` for named models, GPUs and bandwidths (GB/s), with these names in it.

    Raises:
        ValueError: a value out of range, or an unknown GPU.
        OSError: a model configuration that cannot be read.
    """
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size must be at least 1, not {tensor_parallel_size}")
    _refuse_out_of_range(max_new_tokens, prompt_tokens, num_heads, bandwidth, acceptance, gpu)
    options = decoder.TokenSwiftOptions(
        tree=PAPER_TREE if tree is None else tree, ngrams=ngrams, budget=budget, offload=offload, kv_dtype=kv_dtype
    )
    if model is None:
        data = find_data_dir(data_dir)
        model = str(data / REFERENCE_MODEL)
        draft_model = draft_model or (str(data / DRAFT_MODEL) if (data / DRAFT_MODEL).is_dir() else None)
    on_gpus = bool(gpu) or (bandwidth is None and not measure)
    if on_gpus or tensor_parallel_size > 1:
        _refuse_quantised(dtype)
    of_draft = dtype_around() if dtype in QUANTISED_DTYPES else dtype
    device = torch.device("cpu" if dtype in QUANTISED_DTYPES else "cuda")
    shape = read_shape(model, dtype, tensor_parallel_size)
    made = plan(
        shape,
        prompt_tokens,
        max_new_tokens,
        options,
        heads=num_heads,
        draft_model=read_shape(draft_model, of_draft) if draft_model else None,
        bandwidths=_bandwidths(gpu or (GPUS if on_gpus else ()), bandwidth, measure, device),
        acceptances=acceptance or ACCEPTANCES,
        device=device,
    )
    positions = read_config(model).get_text_config().max_position_embeddings
    return {
        "model": model,
        "dtype": dtype,
        "positions": positions,
        "tensor_parallel_size": tensor_parallel_size,
        "tree": tree_in_words(options.fixed_tree),
        "ngrams": options.retrieved_ngrams,
        "offload": offload,
        "kv_dtype": kv_dtype,
        **made,
        "longest_text": longest_texts(shape, positions, prompt_tokens, options, num_heads),
    }


def _refuse_quantised(dtype: str) -> None:
    if dtype in QUANTISED_DTYPES:
        raise ValueError(
            f"dtype {dtype!r} is for one process on a CPU: give its --bandwidth or measure it with --measure, and "
            "leave out --gpu and --tensor-parallel-size"
        )


def _bandwidths(gpus: Iterable[str], given: float | None, measure: bool, device: torch.device) -> dict[str, float]:
    """Bytes per second of each place, by its name: of GPUs, as ``given`` in GB/s, and as measured."""
    bandwidths = {name: GPUS[name].bandwidth for name in gpus}
    if given is not None:
        bandwidths["given"] = given * 1e9
    if measure:
        bandwidths["measured"] = measured_bandwidth(device if torch.cuda.is_available() else torch.device("cpu"))
    return bandwidths


def longest_texts(
    shape: ModelShape, positions: int, prompt_tokens: int, options: "decoder.TokenSwiftOptions", heads: int
) -> dict[str, dict[str, int]]:
    """How many tokens of prompt and output tokenswift has room for, by `FORMS` and GB of `MEMORIES`; 0 for none.

    Weights, caches, heads, tree and logits take the `SHARE` of the memory at most, and a text ends with the model's
    ``positions``.
    """
    longest: dict[str, dict[str, int]] = {}
    for name, form in FORMS.items():
        own = replace(options, offload=form.offload, kv_dtype=form.kv_dtype)

        def held(tokens: int, own: "decoder.TokenSwiftOptions" = own) -> int:
            prompt = min(prompt_tokens, tokens)
            return plan_method("tokenswift", shape, prompt, tokens - prompt, own, heads=heads).total

        longest[name] = {
            str(memory): max(0, bisect_right(range(positions + 1), SHARE * memory * 1e9, key=held) - 1)
            for memory in MEMORIES
        }
    return longest


def _refuse_out_of_range(
    max_new_tokens: int,
    prompt_tokens: int,
    num_heads: int,
    bandwidth: float | None,
    acceptance: Sequence[float],
    gpu: Sequence[str],
) -> None:
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 1),
        ("prompt_tokens", prompt_tokens, 0),
        ("num_heads", num_heads, 1),
        ("bandwidth", bandwidth, 1e-9),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} must be {'above 0' if least < 1 and least else f'at least {least}'}, not {value}")
    if any(not 0 <= alpha <= 1 for alpha in acceptance):
        raise ValueError(f"acceptance must be between 0 and 1, not {', '.join(f'{alpha:g}' for alpha in acceptance)}")
    unknown = [name for name in gpu if name not in GPUS]
    if unknown:
        raise ValueError(f"unknown GPU {unknown[0]!r}: use {', '.join(GPUS)}, --bandwidth or --measure")


def table(made: dict) -> list[RenderableType]:
    """What is held and what is read, a row per method."""
    methods = made["methods"]
    names = {
        "weights": "weights",
        "full_cache": "full cache",
        "draft_cache": "draft cache",
        "drafter": "drafter",
        "tree": "tree",
        "logits": "logits",
        "total": "total",
    }
    fits = _fits if made["dtype"] not in QUANTISED_DTYPES else lambda total: NONE
    held = [
        [name, str(row["nodes"]), *(decimal(row["bytes"][part]) for part in names), fits(row["bytes"]["total"])]
        for name, row in methods.items()
    ]
    places = made["bandwidths"]
    read = [
        [
            name,
            decimal(round(row["bytes_read_per_step"]["mean"])),
            *(number(row["ms_per_step"][place]["mean"], 2) for place in places),
            *(number(row["ms_per_step"][place]["end"], 2) for place in places),
            *(times(value) if row["depth"] else NONE for value in row["speedup"].values()),
        ]
        for name, row in methods.items()
    ]
    fitting = [
        [name, *(f"{tokens:,}" if tokens else "none" for tokens in by_memory.values())]
        for name, by_memory in made["longest_text"].items()
    ]
    alphas = [f"x at {alpha}" for alpha in methods["ar"]["speedup"]]
    if made["offload"]:
        for line, row in zip(read, methods.values(), strict=True):
            line.insert(2, decimal(round(row["bytes_copied_per_step"]["mean"])))
    note = (
        "Bytes at the end of the generation, without activations. ms/step: reading weights and caches once, at the "
        "mean and at the final length; of ar a step is a token. x at a: ar's floor per token over the method's when "
        "each drafted token behind accepted ones is accepted with the chance a, the same for all methods; how well a "
        "method drafts differs, which ts-eval compare measures. Computing and launching come on top. "
        f"Longest text: the tokens of prompt and output for which tokenswift takes {SHARE:.0%} of the memory, up to "
        "the model's positions."
    )
    if made["prompt_tokens"] + made["max_new_tokens"] > made["positions"]:
        note = f"The model ends at {made['positions']:,} positions: a text of this length is refused. {note}"
    copied = ["copied"] if made["offload"] else []
    header = [
        "read",
        *copied,
        *(f"{place} ms/step" for place in places),
        *(f"{place} at end" for place in places),
        *alphas,
    ]
    return [
        _about(made),
        Columns(["held", "nodes", *names.values(), "fits"], held),
        Columns(["per step", *header], read),
        Columns(["longest text, cache", *(f"{memory} GB" for memory in MEMORIES)], fitting),
        note,
    ]


def _about(made: dict) -> str:
    """What the table is of."""
    processes = made["tensor_parallel_size"]
    about = [
        made["model"].rstrip("/").rpartition("/")[2],
        f"{made['prompt_tokens']:,} prompt + {made['max_new_tokens']:,} new tokens",
        f"tree {made['tree']}, k = {made['ngrams']}, partial cache of {made['partial_cache_slots']:,} slots",
        *([f"cache in {made['kv_dtype']}"] if made["kv_dtype"] else []),
        *(["cache in host memory"] if made["offload"] else []),
        *([f"each of {processes} processes that share it"] if processes > 1 else []),
        ", ".join(f"{place} {value / 1e9:,.0f} GB/s" for place, value in made["bandwidths"].items()),
    ]
    return "; ".join(about)


@torch.inference_mode()
def measured_bandwidth(device: torch.device, gigabytes: float = 0.5, repeats: int = 5) -> float:
    """Bytes per second at which ``device`` reads memory: the best of some sums over a large tensor."""
    numbers = torch.ones(int(gigabytes * 1e9 / 4), device=device)

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    best = 0.0
    for _ in range(repeats + 1):
        start = clock()
        numbers.sum()
        best = max(best, numbers.numel() * 4 / (clock() - start))
    return best


def _fits(total: int) -> str:
    return " ".join(name for name, gpu in GPUS.items() if total <= gpu.memory) or "none"
