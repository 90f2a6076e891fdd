"""The generations of an experiment: every row takes its turn at every prompt and run, and each step is kept on disk."""

import gc
import hashlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise

from tqdm import tqdm

import decoder
from decoder.parts import TextStream
from ts_eval import metrics
from ts_eval.comparing.asked import Say
from ts_eval.comparing.endpoint import Timing
from ts_eval.comparing.generation import (
    can_continue,
    continue_batch_with_decoder,
    continue_with_decoder,
    continue_with_transformers,
)
from ts_eval.comparing.memory import PeakMemory, held_bytes, short_of_memory
from ts_eval.comparing.method_spec import ENDPOINT
from ts_eval.comparing.progress import COUNTS, Progress
from ts_eval.comparing.results import GenerationLog
from ts_eval.comparing.setup import Pair, Setup, Turn
from ts_eval.comparing.summary import timed_tokens

WARM_UP_PROMPT_TOKENS = 256
WARM_UP_NEW_TOKENS = 16
IN_PROGRESS = "in-progress"


@contextmanager
def settled() -> Iterator[None]:
    """A block in which `gc.collect` looks for what is left of turns, and not through all that was there before.

    That would take a third of a second for each turn. What somebody else has set aside stays so behind the block.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Rounds:
    """A process's share of the turns of an experiment.

    Args:
        setup: the experiment.
        log: what is finished, and where more goes.
        processes, rank: how many processes share the batches, and which of them this one is; all rows of a batch are
            one process's.
        batches: the numbers of those that are taken; None takes all.
    """

    def __init__(
        self,
        setup: Setup,
        log: GenerationLog,
        processes: int = 1,
        rank: int = 0,
        batches: Collection[int] | None = None,
    ):
        self.setup, self.log, self.rank = setup, log, rank
        self._loaded: int | None = None
        self._turns: list[Turn] = []
        for turn in setup.turns():
            left = tuple(pair for pair in turn.pairs if log.get(turn.spec.text, *pair) is None)
            if left and turn.batch % processes == rank and (batches is None or turn.batch in batches):
                self._turns.append(replace(turn, pairs=left))
        self._kept = {(turn.spec.text, pair): self._progress(turn, pair) for turn in self._turns for pair in turn.pairs}

    def run(self, say: Say, warm_up: bool = True) -> None:
        """Generate what is missing and log it; a generation that was cut goes on where it was.

        Each row makes a few tokens for nothing before, unless it has been done (``warm_up``).
        """
        cut = sum(bool(kept.token_ids) for kept in self._kept.values())
        if cut:
            say(f"{cut} cut generation{'s' if cut > 1 else ''} will be continued.")
        first_turns: dict[str, Turn] = {}
        for turn in self._turns:
            first_turns.setdefault(turn.spec.text, turn)
        for turn in first_turns.values() if warm_up else ():
            self._warm_up(turn)
        with settled():
            self._loaded = held_bytes(self.setup.model.device)
            self._take_all()

    def _take_all(self) -> None:
        total = sum(self.setup.max_new_tokens - len(kept.token_ids) for kept in self._kept.values())
        # In a file each refresh is a line of its own.
        interval = 0.2 if sys.stderr.isatty() else 10
        silent = not self._turns or self.rank > 0
        with tqdm(total=total, unit="tok", disable=silent, leave=False, mininterval=interval) as bar:
            for turn in self._turns:
                where = self._where(turn)
                bar.set_description(where, refresh=False)
                try:
                    self._take(turn, bar)
                except decoder.BatchError as error:
                    # The others of the batch are kept; this one's own error is what a turn of its own would raise.
                    raise next(iter(error.errors.values())) from error
                except (RuntimeError, MemoryError) as error:
                    batch = ", or a smaller --batch" if self.setup.batch > 1 else ""
                    fewer = f"ask for fewer tokens or a narrower tree{batch}"
                    raise short_of_memory(error, f"out of memory at {where}: {fewer}") from error
                finally:
                    for pair in turn.pairs:
                        self._kept[turn.spec.text, pair].close()

    def _where(self, turn: Turn) -> str:
        prompts, runs = len(self.setup.prompts), len(self.setup.params)
        if len(turn.pairs) == 1:
            [(prompt, run)] = turn.pairs
            return f"{turn.spec.text} prompt {prompt + 1}/{prompts} run {run + 1}/{runs}"
        first, last = (run * prompts + prompt + 1 for prompt, run in (turn.pairs[0], turn.pairs[-1]))
        return f"{turn.spec.text} texts {first}-{last}/{prompts * runs}"

    def _progress(self, turn: Turn, pair: Pair) -> Progress:
        text, (prompt, run) = turn.spec.text, pair
        header = {"fingerprint": self.log.fingerprint, "method": text, "prompt_index": prompt, "run": run}
        header |= self.log.row_of(text)
        name = hashlib.sha256(str(header).encode()).hexdigest()[:16]
        path = self.log.folder / IN_PROGRESS / f"{name}.jsonl"
        if not can_continue(turn.spec.name, self.setup.params[run], self.setup.options[text]):
            path.unlink(missing_ok=True)
        return Progress(path, header)

    def _warm_up(self, turn: Turn) -> None:
        ids = self.setup.prompts[0].token_ids[:WARM_UP_PROMPT_TOKENS]
        pairs = [(0, 0)] * len(turn.pairs)
        tokens = min(WARM_UP_NEW_TOKENS, self.setup.max_new_tokens)
        if turn.spec.name == ENDPOINT:
            self.setup.endpoint.generate(ids, tokens, self.setup.params[0], False)
            return
        self._continue(turn, pairs, [ids] * len(pairs), [[]] * len(pairs), tokens, lambda *step: None)

    def _time_server(self, turn: Turn, bar: tqdm) -> None:
        """The turn of a server, which has one text."""
        [(prompt, run)] = turn.pairs
        chosen, tokens = self.setup.prompts[prompt], self.setup.max_new_tokens
        found = self.setup.endpoint.generate(chosen.token_ids, tokens, self.setup.params[run], chosen.chat)
        bar.update(tokens)
        self.log.append(self._record_of_server(turn, (prompt, run), found))

    def _take(self, turn: Turn, bar: tqdm) -> None:
        """A turn, parts of which may be kept already."""
        if turn.spec.name == ENDPOINT:
            self._time_server(turn, bar)
            return
        # What the turn before has left is not this one's.
        gc.collect()
        memory = PeakMemory(self.setup.model.device)
        kept = {pair: self._kept[turn.spec.text, pair] for pair in turn.pairs}

        def finish(pair: Pair) -> None:
            kept[pair].close()
            # Of an answer that ended before.
            bar.total -= self.setup.max_new_tokens - len(kept[pair].token_ids)
            self.log.append(self._record(turn, pair, kept[pair], memory.bytes()))
            kept[pair].discard()

        def lacking(pair: Pair) -> bool:
            tokens = kept[pair].token_ids
            ended = tokens and tokens[-1] in self.setup.stop_ids(pair[0])
            return not ended and len(tokens) < self.setup.max_new_tokens

        for pair in turn.pairs:
            if not lacking(pair):
                finish(pair)
        pairs = [pair for pair in turn.pairs if lacking(pair)]

        def on_step(place: int, tokens: Sequence[int], counts: dict, logprobs: Sequence[float] | None) -> None:
            pair = pairs[place]
            kept[pair].add(tokens, counts, logprobs)
            bar.update(len(tokens))
            if _orphaned():
                raise SystemExit("the process that started this one is gone")
            if not lacking(pair):
                finish(pair)

        if pairs:
            prompts = [self.setup.prompts[prompt].token_ids for prompt, _ in pairs]
            sofar = [list(kept[pair].token_ids) for pair in pairs]
            self._continue(turn, pairs, prompts, sofar, self.setup.max_new_tokens, on_step)
            if any(map(lacking, pairs)):
                raise RuntimeError(f"a generation of {turn.spec.text} ended before its length and without a stop")

    def _continue(
        self,
        turn: Turn,
        pairs: Sequence[Pair],
        prompts: Sequence[Sequence[int]],
        sofar: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_step: Callable[[int, Sequence[int], dict, Sequence[float] | None], None],
    ) -> None:
        """Generate what ``sofar`` lacks; ``on_step`` is told which of the generations a step belongs to."""
        spec, dec, options = turn.spec, self.setup.decoders[turn.spec.text], self.setup.options[turn.spec.text]
        params = [self.setup.params[run] for _, run in pairs]
        stop_ids = [self.setup.stop_ids(prompt) for prompt, _ in pairs]
        if self.setup.batch > 1 and not spec.is_outside:
            texts = (prompts, sofar, max_new_tokens, params, options, stop_ids)
            continue_batch_with_decoder(dec, spec.name, *texts, on_step, self.setup.logprobs)
            return

        def on_its_step(tokens: Sequence[int], counts: dict, logprobs: Sequence[float] | None) -> None:
            on_step(0, tokens, counts, logprobs)

        given = (prompts[0], sofar[0], max_new_tokens, params[0])
        if spec.is_llama:
            wanted = (max_new_tokens, params[0], stop_ids[0])
            self.setup.llama[spec.text].generate(prompts[0], *wanted, on_its_step)
        elif spec.is_hf:
            continue_with_transformers(dec.model, spec.name, *given, stop_ids[0], on_its_step, dec.draft_model)
        else:
            continue_with_decoder(dec, spec.name, *given, options, stop_ids[0], on_its_step, self.setup.logprobs)

    def _what(self, turn: Turn, pair: Pair) -> dict:
        """What tells a record from the others."""
        prompt, run = pair
        return {
            "method": turn.spec.text,
            "prompt": self.setup.prompts[prompt].name,
            "prompt_index": prompt,
            "run": run,
            "batch_index": turn.batch,
            "seed": self.setup.params[run].seed,
            "prompt_tokens": len(self.setup.prompts[prompt].token_ids),
        }

    def _record(self, turn: Turn, pair: Pair, kept: Progress, peak_memory: int | None) -> dict:
        text = turn.spec.text
        prompt_ids = self.setup.prompts[pair[0]].token_ids
        written, pieces = TextStream(self.setup.decoders[text].tokenizer, prompt_ids=prompt_ids), []
        for place, token in enumerate(kept.token_ids):
            written.push(token)
            pieces.append(written.take(final=place == len(kept.token_ids) - 1))
        record = {
            **self._what(turn, pair),
            "new_tokens": len(kept.token_ids),
            "resumed_at": kept.resumed_at,
            "logprobs": kept.logprobs,
            "step_tokens": kept.step_tokens,
            "step_seconds": kept.step_seconds,
            "step_drafted": kept.step_drafted,
            "step_accepted": kept.step_accepted,
            "step_ngram_accepted": kept.step_ngram_accepted,
        }
        counts = kept.counts
        seconds, timed = counts["decode_seconds"], timed_tokens(record)[-1]
        return {
            **record,
            "tokens_per_second": timed / seconds if seconds else None,
            "ms_per_token": 1000 * seconds / timed if timed else None,
            **counts,
            "acceptance_rate": metrics.acceptance_rate(counts["accepted"], counts["drafted"]),
            "ngram_acceptance_rate": metrics.ngram_acceptance_rate(counts["ngram_accepted"], counts["drafted"]),
            "tokens_per_step": metrics.tokens_per_step(len(kept.token_ids), counts["steps"]),
            "peak_memory_bytes": peak_memory,
            "memory_before_bytes": self.setup.memory_before,
            "memory_loaded_bytes": self._loaded,
            "token_ids": kept.token_ids,
            "token_ends": list(accumulate(map(len, pieces))),
            "text": "".join(pieces),
        }

    def _record_of_server(self, turn: Turn, pair: Pair, found: Timing) -> dict:
        """A record like `_record`'s, of what is known of a server's answer."""
        tokens, seconds = found.tokens, found.seconds[-1]
        unknown = [None] * len(tokens)
        record = {
            **self._what(turn, pair),
            "new_tokens": tokens[-1],
            "resumed_at": [],
            "logprobs": None,
            "step_tokens": [now - before for before, now in pairwise([0, *tokens])],
            "step_seconds": found.seconds,
            **dict.fromkeys(("step_drafted", "step_accepted", "step_ngram_accepted"), unknown),
        }
        timed = timed_tokens(record)[-1]
        return {
            **record,
            "tokens_per_second": timed / seconds if seconds else None,
            "ms_per_token": 1000 * seconds / timed if timed else None,
            **dict.fromkeys(COUNTS),
            "prefill_seconds": found.prefill_seconds,
            "decode_seconds": seconds,
            "shared_seconds": seconds,
            **dict.fromkeys(("acceptance_rate", "ngram_acceptance_rate", "tokens_per_step")),
            **dict.fromkeys(("peak_memory_bytes", "memory_before_bytes", "memory_loaded_bytes")),
            "token_ids": [],
            "token_ends": [],
            "text": "",
        }


def _orphaned() -> bool:
    """Whether the process that started this one for its share of the work has died, be it by a kill."""
    parent = multiprocessing.parent_process()
    return parent is not None and os.getppid() != parent.pid
