"""The scoreboard of exactness as a table, on the terminal and as a Markdown page."""

from collections.abc import Sequence

from ts_eval.exactness import biased
from ts_eval.report.table import NONE, count_of, number, sampling_in_words

HEADER = (
    "row", "engine", "greedy: own plain text", "first difference", "tokens/s",
    "sampled: own plain text", "first difference", "tokens/s", "p, one token", "p, two tokens", "tok/step", "drawn",
)  # fmt: skip


def table(results: dict) -> tuple[Sequence[str], list[list[str]]]:
    """Header and rows."""
    rows = []
    for name, row in results["rows"].items():
        found = row["draws"] or {}
        drawn = {None: NONE, True: "NOT from the model", False: "from the model"}[biased(results, row)]
        rows.append(
            [
                name,
                row["engine"],
                *_cells(row["greedy"]),
                *_cells(row["sampled"]),
                *(_p(found.get(test)) for test in ("one", "two")),
                number(found.get("tokens_per_step")),
                drawn,
            ]
        )
    return HEADER, rows


def _cells(part: dict) -> list[str]:
    same = "plain" if part["same"] is None else f"{part['same']} of {part['texts']}"
    first = NONE
    if part["differences"]:
        first = f"{part['median_difference']:,.0f} (earliest {part['earliest_difference']:,})"
    return [same, first, number(part["tokens_per_second"], 1)]


def _p(test: dict | None) -> str:
    return NONE if test is None else f"{test['p']:.2g} ({test['degrees']} df)"


def notes(results: dict) -> list[str]:
    """How the table is to be read, in sentences."""
    settings, environment, alarm = results["settings"], results["environment"], results["false_alarm"]
    model = settings["model"].rstrip("/").rpartition("/")[2]
    sentences = [
        f"{model}, {settings['dtype']}; {environment['device_name']}, {count_of(environment['threads'], 'thread')}; "
        f"{count_of(settings['num_prompts'], 'prompt')}, at most {settings['max_new_tokens']:,} new tokens; greedy, "
        f"and {sampling_in_words(settings['sampling'])} with seed {settings['seed']}.",
        "Own plain text: texts that are, token for token, what the same engine writes without drafts from the same "
        "prompt and seed; first difference: the median place of the others, and the earliest.",
    ]
    engines = {row["engine"].partition(" ")[0] for row in results["rows"].values()}
    if "transformers" in engines:
        sentences.append(
            "transformers draws from a generator of PyTorch whose numbers drafts use up, so a sampled text with drafts "
            "is another one by design; of these the test below tells whether the distribution is kept. Its rows run on "
            "the model as it is loaded here, a GGUF file's with this project's products."
        )
    if any(engine.startswith("llama") for engine in engines):
        sentences.append(
            "llama.cpp draws one number of its own generator per token, with drafts or without, so the same seed "
            "should give the same text; penalties count its own output alone, and temperature comes behind the filters."
        )
    if settings["draws"]:
        odds = f"at most {alarm['odds']:g} for the whole table of {count_of(alarm['tests'], 'test')}"
        sentences.append(
            f"p: chi-square test of {settings['draws']:,} first tokens, and of pairs of the first two, from as many "
            "seeds, without a penalty, against the model's probabilities (llama.cpp's: of its own logits). Outcomes "
            "expected fewer than five times count as one. The odds of a false alarm are "
            f"{odds}, as each is made at p < {alarm['odds'] / max(1, alarm['tests']):.2g}; tok/step: of these draws, "
            "where 1 means that no draft was kept there."
        )
    return sentences


def page(results: dict) -> str:
    """The table and its notes in Markdown."""
    header, rows = table(results)
    lines = [header, ["---"] * len(header), *rows]
    versions = ", ".join(f"{name} {version}" for name, version in results["environment"]["versions"].items() if version)
    commit = results["environment"]["commit"] or "unknown"
    return "\n".join(
        [
            "# Exactness",
            "",
            *(f"| {' | '.join(cells)} |" for cells in lines),
            "",
            *(f"{sentence}\n" for sentence in notes(results)),
            f"Versions: {versions}; commit {commit}; Python {results['environment']['python']}, "
            f"{results['environment']['platform']}.",
            "",
        ]
    )
