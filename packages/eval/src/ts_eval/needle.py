"""Whether a model finds a sentence in a long text, and whether methods answer the same: `ts-eval needle`."""

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from rich.console import RenderableType
from tqdm import tqdm

import decoder
from decoder.parts import chat_ids, dtype_name, text_ids
from ts_eval import defaults
from ts_eval.commands.terminal import Columns
from ts_eval.comparing.asked import Asked, Say, refuse_outside, silent
from ts_eval.comparing.data_dir import find_data_dir
from ts_eval.comparing.decoders import Sources, with_ar
from ts_eval.comparing.method_spec import MethodSpec
from ts_eval.comparing.prompts import SHIPPED, read_texts, refuse_missing_prompts
from ts_eval.comparing.results import environment, read_results, write_json
from ts_eval.report.table import number

SCHEMA_VERSION = 3
RESULTS = "needle.json"
PHRASES = ("phrases", "pass_phrases")
"""Settings that may differ from those of the results that a call goes on with."""
_WORDS = """
amber anchor apple arrow autumn basket beacon bridge button candle canyon carpet castle cherry copper coral cotton
desert eagle ember falcon feather forest garden ginger glacier harbor hazel honey island ivory jacket ladder lantern
lemon marble meadow mirror ocean orange orchid oyster pebble pepper pilot planet ribbon river saddle salmon silver
spider temple thunder tiger tunnel velvet violet walnut willow window winter
"""
PHRASE_WORDS = 4
CUE = "The pass phrase is:"
SPARE_TOKENS = 32
"""By how many tokens a prompt may at most be longer than its length: words are cut anew where texts meet."""
QUESTION = "What is the pass phrase that this text gives? Answer with the pass phrase alone."


def pass_phrase(seed: int) -> str:
    """Four random words, the same for the same seed."""
    return " ".join(random.Random(f"pass phrase {seed}").sample(_WORDS.split(), PHRASE_WORDS))


def hide(text: str, sentence: str, depth: float) -> str:
    """``text`` with ``sentence`` between two of its sentences, a share of about ``depth``, in [0, 1], before it."""
    ends = [0, *(match.end() for match in re.finditer(r"[.!?][\"']?\s+", text)), len(text)]
    at = min(ends, key=lambda end: abs(end - depth * len(text)))
    return " ".join(part for part in (text[:at].rstrip(), sentence, text[at:].lstrip()) if part)


def question_ids(text: str, tokenizer) -> list[int]:
    """Token ids of ``text`` and the question, up to where the pass phrase is to follow.

    With a chat template the text is the user's message, and the answer has begun; else all is one text.
    """
    if tokenizer.chat_template:
        chat = chat_ids([{"role": "user", "content": f"{text}\n\n{QUESTION}"}], tokenizer)
        return [*chat, *tokenizer(CUE, add_special_tokens=False)["input_ids"]]
    return text_ids(f"{text}\n\n{CUE}", tokenizer)


def phrase_logprob(
    dec: "decoder.Decoder",
    prompt: Sequence[int],
    phrase: Sequence[int],
    options: "decoder.TokenSwiftOptions | None" = None,
) -> float:
    """Mean log-probability per token, in nats, of the tokens ``phrase`` behind ``prompt``.

    In the model's plain distribution, and with the full cache that ``options`` ask for.
    """
    found: dict[int, float] = {}

    def force(context: list[int], logits: torch.Tensor) -> torch.Tensor:
        place = len(context) - len(prompt)
        found[place] = float(logits.double().log_softmax(-1)[phrase[place]])
        forced = torch.full_like(logits, -torch.inf)
        forced[phrase[place]] = 0
        return forced

    greedy = decoder.SamplingParams(temperature=0)
    dec.generate(list(prompt), len(phrase), "ar", greedy, options, ignore_eos=True, logits_hook=force)
    return sum(found.values()) / len(phrase)


def needle(methods: Sequence[str] = (), *, say: Say = silent, **settings) -> dict:
    """Hide and ask as ``settings``, the fields of `Needle`, say; returns what needle.json holds.

    Without ``methods`` it is auto beside ar. Raises as `Needle.run`.
    """
    return Needle(tuple(methods) or ("auto",), **settings).run(say)


@dataclass(frozen=True, kw_only=True)
class Needle(Asked):
    """What is hidden where, and who is asked: `ar` always; all answer greedily.

    Args:
        prompts: texts that are read one behind the other.
        lengths: tokens of text, hidden sentence and question together, reached to within a few.
        depths: shares of the text before the sentence, in [0, 1].
        phrases: how many are hidden at each place, one after the other; more are added to those in ``output``.
        max_new_tokens: of an answer.
        seed: of the first pass phrase; phrase i, from 0, has ``seed`` + i.
        yarn: as in `decoder.load`.
        options: fields of `decoder.TokenSwiftOptions` for all methods, such as ``kv_dtype``.
        output: folder; what was asked with the same settings is taken over from it.
        overwrite: ask again, whatever the folder holds.
    """

    lengths: Sequence[int] = defaults.NEEDLE_LENGTHS
    depths: Sequence[float] = defaults.NEEDLE_DEPTHS
    phrases: int = defaults.NEEDLE_PHRASES
    max_new_tokens: int = defaults.NEEDLE_NEW_TOKENS
    yarn: float | None = None
    options: dict | None = None
    output: str | Path = defaults.NEEDLE_OUTPUT

    def run(self, say: Say) -> dict:
        """Hide and ask; the file is written anew with each length, depth and phrase.

        Raises:
            ValueError, OSError: an argument that does not fit or a file that is missing; nothing has been asked.
            OtherSettingsError: ``output`` holds what was asked with other settings.
        """
        self._refuse_wrong_numbers()
        specs = with_ar(self.methods)
        refuse_outside(specs, ": name methods of ts-eval's own")
        options = {spec.text: decoder.TokenSwiftOptions(**{**(self.options or {}), **spec.options}) for spec in specs}
        sources = Sources.find(specs, self.model, self.heads, self.draft_model, self.data_dir)
        books = self.prompts or str(find_data_dir(self.data_dir) / SHIPPED)
        refuse_missing_prompts(books)
        sources.refuse_missing(specs)
        sources = replace(sources, yarn=self.yarn)
        loaded = sources.load(self.device, self.dtype, self.bitwise)
        plain = loaded[None]
        ids = self._text_ids(books, plain.tokenizer)
        self._refuse_too_long(plain.model.config.max_position_embeddings)

        settings = {
            **{name: getattr(self, name) for name in ("lengths", "depths", "phrases", "max_new_tokens", "seed")},
            "methods": {spec.text: asdict(options[spec.text]) for spec in specs},
            "model": sources.model,
            "heads": {spec.text: sources.heads.get(spec.text) for spec in specs},
            "draft_model": sources.draft_model,
            "weights": sources.weights(),
            "prompts": books,
            "dtype": dtype_name(plain.model),
            "bitwise": plain.bitwise,
            **({} if self.yarn is None else {"yarn": self.yarn}),
            "chat": bool(plain.tokenizer.chat_template),
            "pass_phrases": self._pass_phrases(),
        }
        header = {"settings": settings, "environment": environment(plain.model.device, self.arguments)}
        header = json.loads(json.dumps(header))
        path = Path(self.output) / RESULTS
        kept = None if self.overwrite else read_results(path, "ts-eval needle", SCHEMA_VERSION, header, PHRASES)
        results = {"schema_version": SCHEMA_VERSION, **header, "cells": kept["cells"] if kept else []}
        if kept and kept["settings"]["phrases"] > self.phrases:
            results["settings"] |= {name: kept["settings"][name] for name in PHRASES}
        write_json(path, results)
        rows = [(spec, loaded[sources.heads.get(spec.text)], options[spec.text]) for spec in specs]
        wanted = list(itertools.product(self.lengths, self.depths, self._pass_phrases()))
        asked = {(cell["length"], cell["depth"], cell["phrase"]) for cell in results["cells"]}
        left = [place for place in wanted if place not in asked]
        if asked:
            say(f"{len(wanted) - len(left)} of {len(wanted)} taken over from {path}.")
        for length, depth, phrase in tqdm(left, "needle", leave=False, disable=None):
            text = plain.tokenizer.decode(ids[: length - _around(phrase, plain.tokenizer)])
            results["cells"].append(self._ask(rows, text, length, depth, phrase, results["cells"]))
            write_json(path, results)
        return results

    def _pass_phrases(self) -> list[str]:
        return [pass_phrase(self.seed + number) for number in range(self.phrases)]

    def _ask(
        self,
        rows: "Sequence[tuple[MethodSpec, decoder.Decoder, decoder.TokenSwiftOptions]]",
        text: str,
        length: int,
        depth: float,
        phrase: str,
        cells: Sequence[dict],
    ) -> dict:
        """One place and phrase, with each of ``rows``, the first of which scores; ``cells`` are those before."""
        _, dec, options = rows[0]
        prompt = question_ids(hide(text, f"{CUE} {phrase}.", depth), dec.tokenizer)
        tokens = dec.tokenizer(f" {phrase}", add_special_tokens=False)["input_ids"]
        same = (cell for cell in cells if (cell["length"], cell["phrase"]) == (length, phrase))
        without = next((cell["logprob_without"] for cell in same), None)
        if without is None:
            without = phrase_logprob(dec, question_ids(text, dec.tokenizer), tokens, options)
        greedy = decoder.SamplingParams(temperature=0)
        answers = {}
        for spec, own, its in rows:
            out = own.generate(prompt, self.max_new_tokens, spec.name, greedy, its)
            found = phrase in " ".join(out.text.lower().split())
            answers[spec.text] = {"found": found, "text": out.text, "token_ids": list(out.token_ids)}
        for answer in answers.values():
            answer["identical_to_ar"] = answer["token_ids"] == answers["ar"]["token_ids"]
        return {
            "length": length,
            "depth": depth,
            "phrase": phrase,
            "prompt_tokens": len(prompt),
            "logprob": phrase_logprob(dec, prompt, tokens, options),
            "logprob_without": without,
            "answers": answers,
        }

    def _refuse_wrong_numbers(self) -> None:
        for name in ("max_new_tokens", "phrases"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.lengths or not self.depths:
            raise ValueError("lengths and depths must be one or more numbers each")
        outside = next((depth for depth in self.depths if not 0 <= depth <= 1), None)
        if outside is not None:
            raise ValueError(f"depths must be between 0 and 1, not {outside:g}")
        if Path(self.output).exists() and not Path(self.output).is_dir():
            raise NotADirectoryError(f"--output {self.output} is a file: name a folder")

    def _refuse_too_long(self, positions: int) -> None:
        longest = max(self.lengths) + SPARE_TOKENS + self.max_new_tokens
        if longest > positions:
            raise ValueError(
                f"lengths must be at most {positions - longest + max(self.lengths):,} with this model and answer, not "
                f"{max(self.lengths):,}: it has {positions:,} positions"
            )

    def _text_ids(self, books: str, tokenizer) -> list[int]:
        """Token ids of the books, enough for the longest text with any sentence and the question."""
        around = max(_around(phrase, tokenizer) for phrase in self._pass_phrases())
        if min(self.lengths) <= around:
            raise ValueError(
                f"lengths must be above {around}, what sentence and question take, not {min(self.lengths)}"
            )
        ids: list[int] = []
        for name, text in read_texts(books):
            if not isinstance(text, str):
                raise ValueError(f"{name} of {books} is a chat: give texts to hide a sentence in")
            ids += tokenizer(f"{text}\n\n", add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= max(self.lengths):
                break
        if len(ids) + around < max(self.lengths):
            raise ValueError(f"lengths must be at most {len(ids) + around:,}, all that {books} has")
        return ids


def _around(phrase: str, tokenizer) -> int:
    """How many tokens the sentence with a phrase and the question take of a text's length."""
    return len(question_ids(f"{CUE} {phrase}.", tokenizer))


def table(results: dict) -> list[RenderableType]:
    """How often each method finds a phrase at each length and depth, as ar does, and how likely the model finds it."""
    methods = list(results["settings"]["methods"])
    header = ["tokens", "depth", *methods, "identical", "log p", "without", "gain"]
    rows = []
    places: dict[tuple[int, float], list[dict]] = {}
    for cell in results["cells"]:
        places.setdefault((cell["length"], cell["depth"]), []).append(cell)
    for (length, depth), cells in places.items():
        told = [_rate([cell["answers"][name]["found"] for cell in cells]) for name in methods]
        same = all(answer["identical_to_ar"] for cell in cells for answer in cell["answers"].values())
        found, without = (mean(cell[name] for cell in cells) for name in ("logprob", "logprob_without"))
        scores = map(number, (found, without, found - without))
        rows.append([f"{length:,}", f"{depth:g}", *told, "yes" if same else "NO", *scores])
    several = " a share of all phrases, log-probabilities their means;" if results["settings"]["phrases"] > 1 else ""
    about = (
        f"By method whether the answer has the pass phrase;{several} identical: all answers are ar's, token for token; "
        "log p: log-probability per token, in nats, of the pass phrase behind the text; without: where the text does "
        "not have it; gain: their difference."
    )
    return [Columns(header, rows), about]


def _rate(found: Sequence[bool]) -> str:
    """Of one phrase whether it was found, of several the share of those that were, with their count."""
    if len(found) == 1:
        return "found" if found[0] else "no"
    return f"{sum(found) / len(found):.0%} ({sum(found)}/{len(found)})"
