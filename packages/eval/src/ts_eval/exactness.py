"""A scoreboard of exactness: which engines' drafts keep the text of their own plain decoding, and how fast each is.

An engine is compared with itself alone: ours with ar, transformers' drafting with its plain generate, llama.cpp's with
its own. Where an engine samples, a chi-square test tells as well whether it draws from the model's distribution.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

import torch

import decoder
from ts_eval import defaults
from ts_eval.compare import Experiment, keeping
from ts_eval.comparing import draws, llama_cpp
from ts_eval.comparing.asked import AskedOfMany, Say, silent
from ts_eval.comparing.decoders import Sources
from ts_eval.comparing.intervals import weighted_median
from ts_eval.comparing.method_spec import MethodSpec, plain_row, row_names
from ts_eval.comparing.on_cluster import cluster_of, generate_on
from ts_eval.comparing.prompts import Prompt
from ts_eval.comparing.results import GenerationLog, write_json, write_text
from ts_eval.comparing.rounds import Rounds, settled
from ts_eval.comparing.setup import Setup, set_up
from ts_eval.comparing.summary import first_divergence

SCHEMA_VERSION = 1
RESULTS, PAGE = "exactness.json", "exactness.md"


def exactness(methods: Sequence[str] = (), *, say: Say = silent, **settings) -> dict:
    """Generate and compare as ``settings``, the fields of `Exactness`, say; returns what exactness.json holds.

    Without ``methods`` it is every row whose heads, draft model or package are at hand. Raises as `Exactness.run`.
    """
    return Exactness(tuple(methods), **settings).run(say)


@dataclass(frozen=True, kw_only=True)
class Exactness(AskedOfMany):
    """Which engines are asked for what.

    Args:
        max_new_tokens: of a text.
        sampling: fields of `decoder.SamplingParams` of the sampled texts; greedy ones have temperature 0, and the draws
            no penalty.
        draws: texts of other seeds for the chi-square test; 0 leaves it out.
        output: folder; what was generated in it is kept and not generated again.
    """

    max_new_tokens: int = defaults.EXACTNESS_NEW_TOKENS
    draws: int = defaults.EXACTNESS_DRAWS
    output: str | Path = defaults.EXACTNESS_OUTPUT

    def run(self, say: Say) -> dict:
        """Generate what is missing, and write exactness.json and exactness.md.

        Raises:
            ValueError, OSError, MemoryError: as `compare.Experiment`.
        """
        if self.draws < 0:
            raise ValueError(f"draws must be at least 0, not {self.draws}")
        sampling = {**defaults.SAMPLING, **(self.sampling or {})}
        if not sampling["temperature"]:
            raise ValueError("temperature must be above 0: greedy texts are generated as well")
        methods = self.methods or self._at_hand(sampling, say)
        rows: dict[str, dict] = {}
        for part, changed in (("greedy", {"temperature": 0.0}), ("sampled", {})):
            say(f"{part} texts")
            setup, log = self._generate(self._experiment(part, methods, sampling | changed), say)
            for spec in setup.specs:
                rows.setdefault(spec.text, self._about(spec, setup))[part] = _against_plain(spec, setup, log)
        for row in rows.values():
            row["draws"] = None
        if self.draws:
            say(f"{self.draws} draws")
            self._draw(rows, methods, sampling | {"repetition_penalty": 1.0}, say)
        tests = [test for row in rows.values() for test in _tests(row)]
        results = {
            "schema_version": SCHEMA_VERSION,
            "environment": setup.environment,
            "settings": {**setup.settings, "draws": self.draws},
            "false_alarm": {"odds": draws.FALSE_ALARM, "tests": len(tests)},
            "rows": rows,
        }
        results = json.loads(json.dumps(results))
        # Imported here because it needs rich, which generating does not.
        from ts_eval.report.exactness import page

        write_json(Path(self.output) / RESULTS, results)
        write_text(Path(self.output) / PAGE, page(results))
        return results

    def _at_hand(self, sampling: dict, say: Say) -> list[str]:
        """Every row that can run, ours and others'; of the others it is said why not."""
        specs = [MethodSpec.parse(name) for name in row_names()]
        sources = Sources.find(specs, self.model, self.heads, self.draft_model, self.data_dir)
        lacking = sources.lacking(specs)
        for spec in specs:
            try:
                llama_cpp.find_servers([spec], sources.model, sources.draft_model, decoder.SamplingParams(**sampling))
            except ValueError as error:
                lacking.setdefault(spec.text, str(error))
        for name, reason in lacking.items():
            say(f"without {name}: {reason}")
        return [spec.text for spec in specs if spec.text not in lacking]

    def _experiment(self, part: str, methods: Sequence[str], sampling: dict, **changed) -> Experiment:
        same = {field.name: getattr(self, field.name) for field in fields(AskedOfMany)}
        same |= {"methods": tuple(methods), "sampling": sampling, "max_new_tokens": self.max_new_tokens, "runs": 1}
        return Experiment(**same | {"output": Path(self.output) / part} | changed)

    def _generate(
        self, experiment: Experiment, say: Say, change: Callable[[Setup], Setup] | None = None
    ) -> tuple[Setup, GenerationLog]:
        """The generations of an experiment, those that are there taken over."""
        cluster = cluster_of(experiment)
        if cluster is not None:
            # The threads are a part of what all processes must have alike.
            torch.set_num_threads(cluster.cpus)
        setup = set_up(experiment) if change is None else change(set_up(experiment))
        with (
            GenerationLog(Path(experiment.output), setup.settings, setup.environment, overwrite=self.overwrite) as log,
            keeping(Path(self.output)),
        ):
            if kept := len(log):
                say(f"{kept} finished generations taken over from {log.path}.")
            log.begin()
            with settled():
                if cluster is None:
                    Rounds(setup, log).run(say)
                else:
                    generate_on(cluster, experiment, setup, log, change)
        return setup, log

    def _about(self, spec: MethodSpec, setup: Setup) -> dict:
        versions = setup.environment["versions"]
        if spec.is_hf:
            engine = f"transformers {versions['transformers']}"
        elif spec.is_llama:
            engine = setup.settings["llama_cpp"][spec.text]
        else:
            engine = f"tokenswift-decoder {versions['tokenswift-decoder']}"
        return {"engine": engine, "plain": plain_row(spec, setup.specs)}

    def _draw(self, rows: dict[str, dict], methods: Sequence[str], sampling: dict, say: Say) -> None:
        """Add to each row the tests of its draws; a llama-server's logits are not known."""

        def said_again(setup: Setup) -> Setup:
            first = setup.prompts[0]
            ids = draws.draw_prompt(first.token_ids, setup.model, setup.params[0])
            return replace(
                setup, prompts=[Prompt(first.name, tuple(ids))], settings={**setup.settings, "drawn_behind": ids}
            )

        experiment = self._experiment(
            "draws", methods, sampling, runs=self.draws, num_prompts=1, max_new_tokens=draws.NEW_TOKENS
        )
        setup, log = self._generate(experiment, say, said_again)
        prompt, params = setup.prompts[0].token_ids, setup.params[0]

        def ours(text: Sequence[int]) -> torch.Tensor:
            with torch.inference_mode():
                return setup.model(torch.tensor([list(text)], device=setup.model.device)).logits[0, -1]

        shares = {"ours": draws.expected_shares(prompt, self.draws, ours, params)}
        for spec in setup.specs:
            key = "ours"
            if spec.is_llama:
                engine = setup.llama[str(rows[spec.text]["plain"] or spec.text)]
                if not isinstance(engine, llama_cpp.Package):
                    continue
                key = "llama.cpp"
                if key not in shares:
                    theirs = lambda text, engine=engine: torch.from_numpy(engine.logits(text))  # noqa: E731
                    shares[key] = draws.expected_shares(prompt, self.draws, theirs, params, temperature_last=True)
            records = [_record(log, spec.text, run=run) for run in range(self.draws)]
            one, two = shares[key]
            rows[spec.text]["draws"] = {
                "tokens_per_step": sum(record["new_tokens"] for record in records)
                / sum(record["steps"] for record in records),
                "one": draws.chi_square(Counter(record["token_ids"][0] for record in records), one),
                "two": draws.chi_square(Counter(tuple(record["token_ids"][:2]) for record in records), two),
            }


def _tests(row: dict) -> list[dict]:
    """The chi-square tests of a row."""
    return [test for name in ("one", "two") if row["draws"] and (test := row["draws"][name])]


def biased(results: dict, row: dict) -> bool | None:
    """Whether a test of the row has an alarm; None of a row that has none."""
    tests = _tests(row)
    alarm = results["false_alarm"]
    return any(test["p"] < alarm["odds"] / alarm["tests"] for test in tests) if tests else None


def _record(log: GenerationLog, row: str, prompt: int = 0, run: int = 0) -> dict:
    record = log.get(row, prompt, run)
    assert record is not None, "all rows have been generated"
    return record


def _against_plain(spec: MethodSpec, setup: Setup, log: GenerationLog) -> dict:
    """How many of a row's texts are its engine's plain ones, where the others begin to differ, and the speed."""
    plain = plain_row(spec, setup.specs)
    records = [_record(log, spec.text, prompt) for prompt in range(len(setup.prompts))]
    speeds = [(each["tokens_per_second"], max(1, each["new_tokens"])) for each in records if each["tokens_per_second"]]
    found: dict = {"texts": len(records), "tokens_per_second": weighted_median(speeds) if speeds else None}
    if plain in (None, spec.text):
        return {**found, "same": None, "differences": None, "median_difference": None, "earliest_difference": None}
    places = [
        first_divergence(_record(log, plain, prompt)["token_ids"], record["token_ids"])
        for prompt, record in enumerate(records)
    ]
    differences = sorted(place for place in places if place is not None)
    return {
        **found,
        "same": places.count(None),
        "differences": differences,
        "median_difference": median(differences) if differences else None,
        "earliest_difference": min(differences, default=None),
    }
