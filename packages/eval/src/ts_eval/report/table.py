"""What `ts-eval compare` tells: tables, how they are to be read, and the beginning of a text."""

import textwrap
from collections.abc import Sequence

from rich.console import Group, RenderableType

from decoder.drafters import TUNED
from ts_eval.commands.terminal import Columns, indented
from ts_eval.comparing.checks import differs
from ts_eval.comparing.method_spec import ENDPOINT, MethodSpec
from ts_eval.metrics import BLEU_ORDERS

NONE = "-"
DISTINCT = ("1", "2", "3", "4", "mean")
DISTINCT_HEADER = ("Dist-1", "Dist-2", "Dist-3", "Dist-4", "mean")
INTERVAL_HEADER = "95% CI"
TITLE_LETTERS = 60  # of the prompts in a title, more or less
BATCH_HEADER = ("batch tok/s", "batch x", "texts/step")


def number(value: float | None, digits: int = 2) -> str:
    """A number with thousands separators, or a dash for None."""
    return NONE if value is None else f"{value:,.{digits}f}"


def comparison(results: dict) -> list[RenderableType]:
    """The header, tables and beginning of the text of a comparison, from the content of results.json."""
    return [
        describe(results),
        Columns(*speed_table(results)),
        Columns(*length_table(results)),
        notes(results),
        beginning(results["methods"]),
    ]


def speed_table(results: dict, distinct: bool = True) -> tuple[list[str], list[list[str]]]:
    """Header and rows: speed, acceptance, identity and, unless another table has them, Distinct-n per method."""
    together = results["settings"]["batch"] > 1
    sure = any(row["speedup_interval"] is not None for row in results["methods"].values())
    header = ["method", "tokens/s", "speed-up", "range", *([INTERVAL_HEADER] if sure else ())]
    header += [*(BATCH_HEADER if together else ()), "alpha", "beta", "tok/step", "identical"]
    header += DISTINCT_HEADER if distinct else ()
    rows = [
        [
            name,
            number(row["tokens_per_second"], 1),
            times(row["speedup"]),
            spread(row["speedup_range"] if len(row["runs"]) > 1 else None),
            *([spread(row["speedup_interval"])] if sure else []),
            *(_batch_cells(row) if together else ()),
            number(row["acceptance_rate"]),
            number(row["ngram_acceptance_rate"]),
            number(row["tokens_per_step"]),
            identity(results, name),
            *(number(row["distinct"][order], 3) for order in DISTINCT if distinct),
        ]
        for name, row in results["methods"].items()
    ]
    return header, rows


def _batch_cells(row: dict) -> list[str]:
    """The cells of `BATCH_HEADER`."""
    return [number(row["throughput"], 1), times(row["throughput_speedup"]), number(row["texts_per_step"], 1)]


def speedups_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the speed-up up to each mark."""
    marks = [mark["tokens"] for mark in results["methods"]["ar"]["along_length"]]
    rows = [
        [name, *(times(mark["speedup"]) for mark in row["along_length"])] for name, row in results["methods"].items()
    ]
    return ["speed-up up to", *(f"{mark:,}" for mark in marks)], rows


def length_table(results: dict, speedups: bool = True) -> tuple[list[str], list[list[str]]]:
    """Header and rows: milliseconds per token up to each mark and, unless another table has it, the speed-up there."""
    marks = [mark["tokens"] for mark in results["methods"]["ar"]["along_length"]]
    rows = [
        [
            name,
            *(
                number(mark["ms_per_token"]) + (f" {times(mark['speedup'])}" if speedups else "")
                for mark in row["along_length"]
            ),
            number(row["prefill_seconds"]),
            gigabytes(row["peak_memory_bytes"]),
        ]
        for name, row in results["methods"].items()
    ]
    return ["ms/token up to", *(f"{mark:,}" for mark in marks), "prefill s", "peak GB"], rows


def acceptance_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: acceptance by source (part of alpha) and by depth (share of steps), methods that draft only."""
    drafting = {name: row for name, row in results["methods"].items() if row["acceptance_by_depth"]}
    depths = max((_shown_depths(row["acceptance_by_depth"]) for row in drafting.values()), default=0)
    sources = list(dict.fromkeys(source for row in drafting.values() for source in row["acceptance_by_source"]))
    rows = [
        [
            name,
            number(row["acceptance_rate"]),
            *(number(row["acceptance_by_source"].get(source)) for source in sources),
            *(number(share) for share in row["acceptance_by_depth"][:depths]),
            *[NONE] * (depths - len(row["acceptance_by_depth"])),
        ]
        for name, row in drafting.items()
    ]
    return ["method", "alpha", *(f"from {s}" for s in sources), *(f"depth {n}" for n in range(1, depths + 1))], rows


def distinct_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the share of unique n-grams, over tokens for each n and their mean, and that mean over words."""
    rows = [
        [
            name,
            *(number(row["distinct"][order], 3) for order in DISTINCT),
            number(row["distinct_words"]["mean"], 3),
        ]
        for name, row in results["methods"].items()
    ]
    return ["method", *DISTINCT_HEADER, "mean, words"], rows


def text_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """Header and rows: repetition and likelihood of the texts, without measures that no row has."""
    header = [
        "method",
        *(f"Self-BLEU-{n}" for n in BLEU_ORDERS),
        "longest repeat",
        "repeated",
        "loop at",
        "compression",
        "perplexity",
        "semantic",
    ]
    rows = [
        [
            name,
            *(number(row["self_bleu"][str(n)], 3) for n in BLEU_ORDERS),
            number(row["longest_repeated_span"], 0),
            number(row["repeated_share"], 3),
            number(row["loop_start"], 0),
            number(row["compression_ratio"]),
            number(row["perplexity"], 1),
            number(row["semantic_diversity"], 3),
        ]
        for name, row in results["methods"].items()
    ]
    known = [place for place, cells in enumerate(zip(*rows, strict=True)) if set(cells) != {NONE}]
    return [header[place] for place in known], [[row[place] for place in known] for row in rows]


def times(value: float | None) -> str:
    """A speed-up: 1.23x."""
    return NONE if value is None else f"{value:.2f}x"


def spread(values: Sequence[float] | None) -> str:
    """The smallest and largest of some speed-ups: 1.07-1.27."""
    return NONE if values is None else "-".join(f"{value:.2f}" for value in values)


def _shown_depths(shares: Sequence[float]) -> int:
    """Up to where a depth is more than 0.00: chains from the text are long, and columns of zeros make a wide table."""
    return max((depth for depth, share in enumerate(shares, 1) if share >= 0.005), default=1)


def gigabytes(value: int | None) -> str:
    """Bytes in units of 10^9."""
    return NONE if value is None else number(value / 1e9, 2)


def title_of(results: dict) -> str:
    """Which model wrote behind which prompts, as a title."""
    settings = results["settings"]
    model = settings["model"].rstrip("/").rpartition("/")[2]
    titles = list(dict.fromkeys(run["prompt"] for run in results["methods"]["ar"]["runs"]))
    named = ", ".join(titles)
    # Prompts without a title are called by their line in the file.
    lines = [title.rpartition(":") for title in titles]
    if len(titles) > 1 and all(line.isdecimal() and file == lines[0][0] for file, _, line in lines):
        return f"{model}: {len(titles)} prompts of {lines[0][0]}"
    if len(named) > TITLE_LETTERS:
        named = textwrap.shorten(titles[0], TITLE_LETTERS, placeholder=" ...")
        named += f" and {len(titles) - 1} more" if len(titles) > 1 else ""
    return f"{model}: {named}"


def describe(results: dict) -> str:
    """What was measured, where and how, in one sentence of parts."""
    settings, environment = results["settings"], results["environment"]
    lengths = sorted(set(settings["prompt_lengths"]))
    prompt_tokens = " to ".join(f"{length:,}" for length in dict.fromkeys((lengths[0], lengths[-1])))
    return "; ".join(
        [
            settings["model"].rstrip("/").rpartition("/")[2],
            f"{environment['device_name']} ({environment['device']}), {count_of(environment['threads'], 'thread')}",
            settings["dtype"] + (", bitwise" if settings.get("bitwise") else ""),
            f"{count_of(settings['num_prompts'], 'prompt')} of {prompt_tokens} tokens",
            f"{settings['max_new_tokens']:,} new tokens",
            *([f"{settings['batch']} texts at a time"] if settings["batch"] > 1 else []),
            *cache_in_words(settings["options_for_all"]),
            sampling_in_words(settings["sampling"]),
            f"seed {settings['seed']}",
            f"{drafts_in_words(settings['options_for_all'])} where the method names no other",
        ]
    )


def cache_dtype(settings: dict) -> str | None:
    """In what our rows keep the full cache, where that is not the model's dtype."""
    return settings["options_for_all"].get("kv_dtype")


def cache_in_words(options: dict) -> list[str]:
    """How some options ask for the full cache to be kept, unless as it is."""
    kv_dtype, offload = options.get("kv_dtype"), options.get("offload")
    words = [f"keys and values in {kv_dtype}, which is another model: ar has them, too"] if kv_dtype else []
    return words + (["cache in host memory"] if offload else [])


def drafts_in_words(options: dict) -> str:
    """The tree and the paper's k that some options ask for."""
    k = "" if options["ngrams"] is None else f" and k = {options['ngrams']}"
    return ("tree by what pays here" if options["tree"] is None else f"tree {tree_in_words(options['tree'])}") + k


def by_cost(name: str, options: dict) -> bool:
    """Whether a row's trees are chosen step by step by what they cost."""
    method = MethodSpec.parse(name).name
    if options["verification"] != "exact":
        return False
    return method in ("auto", "suffix") or (options["tree"] is None and method in TUNED)


def tree_in_words(tree: Sequence) -> str:
    """A tree as it is typed: 1,3,3,3, or paths of ranks."""
    if isinstance(tree[0], int):
        return ",".join(map(str, tree))
    return " ".join(".".join(map(str, path)) for path in tree)


def sampling_in_words(sampling: dict) -> str:
    """The sampling settings that are switched on, as in "temperature 1, min-p 0.1, penalty 1.2 over 1,024"."""
    if sampling["temperature"] == 0:
        words = ["greedy"]
    else:
        words = [f"temperature {sampling['temperature']:g}"]
        off = {"top_k": 0, "top_p": 1, "min_p": 0, "eta_cutoff": 0}
        words += [f"{name.replace('_', '-')} {sampling[name]:g}" for name in off if sampling[name] != off[name]]
    if sampling["repetition_penalty"] != 1:
        words.append(f"penalty {sampling['repetition_penalty']:g} over {sampling['penalty_window']:,}")
    return ", ".join(words)


def identity(results: dict, name: str) -> str:
    """Whether a row's texts are ar's: yes, or where they part and whether rounding alone decides there."""
    row = results["methods"][name]
    if row["identical_to_ar"] is None:
        own = row.get("identical_to_own_plain")
        return NONE if own is None else "own" if own else f"not own, at {row['own_first_divergence']:,}"
    if row["identical_to_ar"]:
        return "yes"
    return f"{'no,' if name in differs(results) else 'tie'} at {row['first_divergence']:,}"


def count_of(count: int, noun: str) -> str:
    """A number of things in words: 1 thread, 2 threads."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def notes(results: dict) -> str:
    """How the tables are to be read, as a paragraph."""
    return " ".join(remarks(results))


def remarks(results: dict) -> list[str]:
    """How the tables are to be read, a sentence or a few that belong together each."""
    settings, methods = results["settings"], results["methods"]
    runs = len(methods["ar"]["runs"])
    how = f"Medians of {runs} interleaved generations per method" if runs > 1 else "One generation per method"
    sentences = [
        f"{how}, {count_of(settings['runs'], 'run')} of {count_of(settings['num_prompts'], 'prompt')}; prefill is not "
        "counted. Speed-up: ar's time per token over the method's, its range over the generations beside it. alpha: "
        "accepted tokens over the depths of the trees; beta: the part of alpha that n-grams reached; identical: to ar, "
        "token for token; Dist-n: unique n-grams over all n-grams.",
    ]
    if methods["ar"]["speedup_interval"] is not None:
        sentences.append(
            f"{INTERVAL_HEADER}: the bootstrap confidence interval of the median speed-up, prompts drawn again "
            "with all their runs; of few prompts it is a rough one."
        )
    if settings["batch"] > 1:
        sentences.append(
            f"{settings['batch']} texts are decoded together: tokens/s and speed-up are those of one text among them, "
            "batch tok/s those of all together, batch x over ar's, texts/step how many a step decoded."
        )
    if any(row["identical_to_ar"] is None and MethodSpec.parse(name).is_hf for name, row in methods.items()):
        sentences.append(
            "transformers' own rows penalise the whole text and draw other noise, so their text is another one unless "
            "greedy under the same penalty."
            + (" With --kv-dtype they keep keys and values as computed." if cache_dtype(settings) else "")
        )
    sentences += _about_own(results)
    if ENDPOINT in methods:
        sentences.append(
            f"{ENDPOINT} is the server at {settings['endpoint']}, timed from its first piece of text to its last one; "
            "its text is neither compared nor kept."
        )
    if all(row["logprobs_equal"] for row in methods.values()):
        sentences.append("The log-probabilities of all tokens are ar's, too, to the last bit.")
    scored = [audit for row in methods.values() for audit in row.get("audits", ())]
    if scored and not any(audit.get("fault", audit["index"]) is not None for audit in scored):
        # Old results tell no ties, and were cut at the first.
        ties = sum(len(audit.get("ties", ())) for audit in scored)
        words = f"but {count_of(ties, 'tie')} within rounding" if ties else "all of them"
        tokens = sum(audit["checked"] for audit in scored)
        sentences.append(
            f"Scored again by the plain model, the {tokens:,} tokens of all rows are its own choices, {words}."
        )
    resumed = [name for name, row in methods.items() if row["resumed"]]
    if resumed:
        sentences.append(
            f"Cut and resumed: a generation of {', '.join(resumed)}; its time is the sum of its parts, which other "
            "methods' turns do not surround."
        )
    return sentences + _about_trees(results)


def _about_own(results: dict) -> list[str]:
    """What is compared of rows that are other engines'."""
    methods, versions = results["methods"], results["settings"].get("llama_cpp")
    sentences = []
    plain = dict.fromkeys(row["own_plain"] for row in methods.values() if row.get("own_plain"))
    if plain:
        sentences.append(f"own: the text of the same engine without drafts ({', '.join(plain)}), token for token.")
    if "hf" in plain and results["settings"]["sampling"]["temperature"]:
        sentences.append(
            "Where transformers samples with drafts it draws other numbers of its generator than without, so that the "
            "same seed gives another text of the same distribution."
        )
    if versions:
        told = ", ".join(dict.fromkeys(versions.values()))
        sentences.append(
            f"{told}: on the same file, with its own sampler (penalty over its own output, temperature last) and "
            "noise, so its text is not compared with ar's; a server's time is its own, spread evenly over its tokens."
        )
    return sentences


def _about_trees(results: dict) -> list[str]:
    settings, methods = results["settings"], results["methods"]
    sentences: list[str] = []
    chosen = [
        name
        for name, options in settings["options"].items()
        if by_cost(name, options) and methods[name].get("nodes_per_step")
    ]
    if chosen:
        nodes = ", ".join(f"{name} {methods[name]['nodes_per_step']:.1f}" for name in chosen)
        sentences.append(
            "Trees that are chosen step by step by measured costs and acceptance had, with the newest token, so many "
            f"nodes on average: {nodes} (--preset paper takes the paper's)."
        )
        if any(MethodSpec.parse(name).name == "tokenswift" for name in chosen):
            sentences.append("TokenSwift's draft pass is made where it pays.")
    papers = [name for name, options in settings["options"].items() if options["tree"] == [1, 3, 3, 3]]
    slow = [name for name in papers if name.startswith("tokenswift") and (methods[name]["speedup"] or 1) < 1]
    if slow and results["environment"]["device"] == "cpu":
        sentences.append("The paper's tree is a wide one for a CPU: without --tree and --ngrams what pays is chosen.")
    return sentences


def beginning(methods: dict, letters: int = 600) -> Group:
    """The beginning of the text that the first prompt got from the last method, and whose text it is."""
    name, row = next((name, row) for name, row in reversed(methods.items()) if name != ENDPOINT)
    record = row["runs"][0]
    # A model may well generate control characters, which would upset a terminal.
    printable = "".join(letter if letter.isprintable() else " " for letter in record["text"])
    text = textwrap.shorten(printable, letters, placeholder=" ...")
    return Group(f"{record['prompt']}, continued by {name}:", indented(text))
