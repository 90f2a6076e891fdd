"""The measurements of `ts-eval bench`, in three stages of interleaved rounds after a warm-up round.

The stages are what is less than a pass (sampling, heads); whole generations from a real prompt, told apart into parts;
passes over texts of given lengths, and the memory's bandwidth.

At the given lengths only the prompt is prefilled: the cache is filled with its keys and values over and over, which
cost as much to attend to as those of a text of that length. What such a text would be is meaningless, so only plain
decoding, single verifications and single draft passes are timed there.
"""

import gc
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from tqdm import tqdm

import decoder
from decoder.heads import Heads
from decoder.parts import (
    AssistantModel,
    DFlashDraftModel,
    DraftLayer,
    DraftLayerCache,
    DraftVocabulary,
    FullCache,
    GenerationRequest,
    PartialCache,
    RepeatedLayer,
    Sampler,
    Target,
    TokenTree,
    attend,
    check_arguments,
    download,
    linked,
)
from ts_eval.comparing.memory import short_of_memory
from ts_eval.measuring.device_trace import DeviceTrace
from ts_eval.measuring.figures import milliseconds, ratio, statistic, summary
from ts_eval.measuring.stopwatch import Stopwatch
from ts_eval.planning.model_shape import ModelShape

COPIED_BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}
"""Of the buffer that is copied and read: far more than any cache of the device holds."""
COPIES = 4
"""One after the other before the clock is read: launching and waiting then weigh nothing."""
CALLS, ENOUGH_SECONDS = 16, 0.2
"""Calls that one figure of a round is the median of; fewer once they have taken so many seconds."""
POSITIONS = 34
"""Positions in a row that sampling and scoring are timed over: twice those that noise is made for at once."""
AR_TOKENS = 16
"""Tokens of plain decoding per round and length."""
LEADING_STEPS = {"cpu": 0, "cuda": 4}
"""Steps of a generation before the clock starts: on CUDA its first passes are run as they are, and then recorded."""
TRACED_STEPS = 16
"""Steps of a generation that is traced: a trace has a line for each of some hundred kernels a pass."""

Operation = Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """A bench with everything loaded; mappings are by the row's name."""

    decoders: "dict[str, decoder.Decoder]"
    names: dict[str, str]
    options: "dict[str, decoder.TokenSwiftOptions]"
    options_for_all: "decoder.TokenSwiftOptions"
    params: "decoder.SamplingParams"
    prompt: list[int]
    new_tokens: int
    repeats: int

    @property
    def ar(self) -> "decoder.Decoder":
        return self.decoders["ar"]

    @property
    def target(self) -> Target:
        return self.ar.target

    @torch.inference_mode()
    def all(self, lengths: Sequence[int], widths: Sequence[int]) -> dict:
        """The figures of all stages. Raises MemoryError, in a sentence, when the device's memory is too small."""
        # In a file each refresh is a line of its own.
        interval = 0.2 if sys.stderr.isatty() else 10
        total = (2 + len(lengths)) * (1 + self.repeats)
        with tqdm(desc="sampling and heads", unit="round", total=total, leave=False, mininterval=interval) as bar:
            try:
                small = self.small(bar)
                # Generations come first: a row that cannot run is told before what takes longest.
                bar.set_description("generations", refresh=False)
                methods = self.generations(bar)
                memory, along = self._bandwidth(), []
                for length in lengths:
                    bar.set_description(f"{length:,} tokens", refresh=False)
                    along.append(self.at_length(length, widths, memory, bar))
                return {**small, "lengths": along, "methods": methods}
            except (RuntimeError, MemoryError) as error:
                raise short_of_memory(
                    error, f"out of memory at {bar.desc.rstrip(': ')}: name shorter --lengths or narrower --widths"
                ) from error

    def _rounds(self, operations: dict[object, Operation], bar: tqdm) -> dict[object, list]:
        """What each operation gives in each round; they take turns in an order that rotates, after a warm-up round."""
        found: dict[object, list] = {name: [] for name in operations}
        names = list(operations)
        for number in range(-1, self.repeats):
            shift = max(number, 0) % len(names)
            for name in names[shift:] + names[:shift]:
                result = operations[name]()
                if number >= 0:
                    found[name].append(result)
            bar.update()
        return found

    def _seconds(self, operation: Operation) -> float:
        """Seconds of a call of ``operation``, the median of up to `CALLS`.

        A first call is not counted: it finds the processor's caches full of what was measured before.
        """
        operation()
        seconds: list[float] = []
        while len(seconds) < CALLS and sum(seconds) < ENOUGH_SECONDS:
            self.target.wait()
            start = time.perf_counter()
            operation()
            self.target.wait()
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    def _bandwidth(self) -> dict[object, Operation]:
        """Time a copy, whose bytes are read and written and so count twice, and a read; both give GB/s."""
        device = self.target.device
        source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
        copy = torch.empty_like(source)

        def speed(operation: Operation, nbytes: int) -> float:
            return COPIES * nbytes / self._seconds(lambda: [operation() for _ in range(COPIES)]) / 1e9

        return {
            "copy": lambda: speed(lambda: copy.copy_(source), 2 * source.nbytes),
            "read": lambda: speed(source.sum, source.nbytes),
        }

    def small(self, bar: tqdm) -> dict:
        """What is less than a pass: one level of each kind of heads, and sampling and scoring per token."""
        cache = FullCache(len(self.prompt) + self.target.width(1))
        with self.target.patched():
            self.target.prefill(self.prompt[:-1], cache)
            [verified] = self.target.forward([TokenTree(self.prompt[-1])], [cache])
        logits = verified.logits[0]
        chooser, scorer = (self._sampler(self.prompt) for _ in range(2))
        width, coupled = max(self._widths(), default=1), self.options_for_all.coupled

        # Many positions in a row, as in a text, since noise may be made for several positions at once.
        def choose() -> None:
            for _ in range(POSITIONS):
                chooser.take(chooser.draw(logits))

        def score() -> None:
            for _ in range(POSITIONS):
                scores = scorer.draft_scores(logits[None], coupled, scorer.draft_context(), weak=True)
                download(scores.topk(min(width, scores.shape[-1])).indices)
                scorer.push(self.prompt[0])

        operations: dict[object, Operation] = {
            "choose": lambda: self._seconds(choose) / POSITIONS,
            "score": lambda: self._seconds(score) / POSITIONS,
        }
        heads = {}
        for dec in self.decoders.values():
            for kind, module in dec.heads.items():
                heads[("heads", module.source)] = kind
                operations["heads", module.source] = self._level(dec, module, verified.hidden[0])
        found = self._rounds(operations, bar)
        return {
            "sampling": {"choose_ms": milliseconds(found["choose"]), "score_ms": milliseconds(found["score"])},
            "heads": [
                {"kind": kind, "checkpoint": key[1], "level_ms": milliseconds(found[key])}
                for key, kind in heads.items()
            ],
        }

    def _widths(self) -> list[int]:
        """Candidates per level of the tree."""
        tree = self.options_for_all.fixed_tree
        return [width if isinstance(width, int) else max(width) + 1 for width in tree]

    def _sampler(self, context: Sequence[int]) -> Sampler:
        target = self.target
        return Sampler(self.params, target.vocab_size, target.device, context, choice=target.backend.choice)

    def _level(self, dec: "decoder.Decoder", heads: Heads, hidden: torch.Tensor) -> Operation:
        """Time one level with what it takes: an embedding where it is conditioned, and the language-model head."""
        vocabulary = DraftVocabulary.of(dec.target, heads)
        if isinstance(heads, RepeatedLayer):
            level = self._layer_level(dec, heads, vocabulary, hidden)
        elif isinstance(heads, DFlashDraftModel):
            level = self._block(dec, heads, vocabulary, hidden)
        elif isinstance(heads, AssistantModel):
            level = self._assistant_level(dec, heads, hidden)
        else:
            assert isinstance(heads, decoder.DraftHeads)
            linear = heads

            def level() -> None:
                embedding = dec.target.embed(self.prompt[-1]) if linear.conditioned else None
                vocabulary.logits(linear.advance(0, hidden, embedding)[1][None])

        def timed() -> float:
            with dec.target.patched():
                return self._seconds(level)

        return timed

    def _layer_level(
        self, dec: "decoder.Decoder", layer: RepeatedLayer, vocabulary: DraftVocabulary, hidden: torch.Tensor
    ) -> Callable[[], None]:
        """A level of a draft layer behind as many entries as the prompt has tokens."""
        weight = layer.fc.weight
        text = self._entries(dec, layer)
        state = torch.randn(1, layer.state_size).to(hidden)
        position = torch.tensor([text.entries + 1], device=weight.device)

        def attending(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
            text.write_drafts(keys, values, 0)
            return attend(query, *text.read(1), scaling=scaling)

        def level() -> None:
            embedding = dec.target.embed(self.prompt[-1:])
            vocabulary.logits(layer.advance(state, embedding, position, attending)[1])

        return level

    def _assistant_level(
        self, dec: "decoder.Decoder", model: AssistantModel, hidden: torch.Tensor
    ) -> Callable[[], None]:
        """A level of an assistant behind as many keys and values as the prompt has tokens, or as its windows see."""
        seen: dict[object, list[torch.Tensor]] = {}
        for kind, shape in dec.target.attention_shapes.items():
            length = len(self.prompt) - kind.first_seen(len(self.prompt))
            seen[kind] = [hidden.new_zeros(shape.kv_heads, length, size) for size in (shape.dim, shape.value_dim)]
        positions = torch.tensor([len(self.prompt)], device=hidden.device)

        def attending(kind: object, query: torch.Tensor, scaling: float) -> torch.Tensor:
            keys, values = seen[kind]
            return attend(query, keys, values, scaling=scaling)

        def level() -> None:
            state, embedding = dec.target.norm(hidden.view(1, -1)), dec.target.embed(self.prompt[-1:])
            model.candidates(model.advance(state, embedding, positions, attending)[1])

        return level

    def _entries(self, dec: "decoder.Decoder", layer: DraftLayer) -> DraftLayerCache:
        """As many entries as the prompt has tokens."""
        text, (kv_heads, *sizes) = DraftLayerCache(layer, dec.target.device), layer.entry_shape
        text.write(*(torch.randn(len(self.prompt), kv_heads, size).to(layer.fc.weight) for size in sizes))
        return text

    def _block(
        self, dec: "decoder.Decoder", model: DFlashDraftModel, vocabulary: DraftVocabulary, hidden: torch.Tensor
    ) -> Callable[[], None]:
        """A block behind such entries: all levels come with it."""
        text, size = self._entries(dec, model), model.shape.block_size
        embedding = torch.randn(size, model.hidden_size).to(hidden)
        positions = text.entries + torch.arange(size, device=hidden.device)

        def level() -> None:
            vocabulary.logits(model.draft(embedding, positions, model.attention_behind(text))[1:])

        return level

    def at_length(self, length: int, widths: Sequence[int], memory: dict[object, Operation], bar: tqdm) -> dict:
        """Plain decoding, verifications and TokenSwift's draft pass over ``length`` tokens of text.

        The memory's bandwidth is measured in the same rounds, as other work on the machine takes part of it.
        """
        target, text = self.target, list(itertools.islice(itertools.cycle(self.prompt), length))
        cache = FullCache(length + target.width(widths[-1]))
        with target.patched():
            queries = self._fill(cache, length)

        def decode() -> float:
            run = self._decode_behind(text)
            return run["seconds"]["step"] / run["tokens"]

        def verify(width: int) -> float:
            # All below the root: what a node costs does not depend on its depth.
            tree = TokenTree(text[-1])
            for token in range(width - 1):
                tree.add(0, token, "bench")
            tree.tokens = [text[-1]] * width
            with target.patched():
                return self._seconds(lambda: target.forward([tree], [cache]))

        slots = min(self.options_for_all.budget_for(length), length)
        memory_of_drafts = PartialCache(slots, min(self.options_for_all.sink, slots - 1))
        memory_of_drafts.append(cache, queries)

        def draft() -> float:
            with target.patched():
                return self._seconds(lambda: target.draft([text[-1]], length, memory_of_drafts))

        operations: dict[object, Operation] = {**memory, "ar": decode, "draft": draft}
        operations |= {width: partial(verify, width) for width in widths}
        return self._figures_at(length, widths, slots, list(memory), self._rounds(operations, bar))

    def _figures_at(
        self, length: int, widths: Sequence[int], slots: int, memory: Sequence[object], found: dict[object, list]
    ) -> dict:
        """The figures of `at_length` from what its operations gave in each round."""
        shape = ModelShape.of(self.ar.model)
        read = shape.pass_bytes + shape.cache_bytes(length)
        floors = {name: [read / (1e9 * speed) for speed in found[name]] for name in memory}
        return {
            "length": length,
            "bandwidth": {name: statistic(found[name]) for name in memory},
            "ar": {
                "ms_per_token": milliseconds(found["ar"]),
                "tokens_per_second": 1 / median(found["ar"]),
                "bytes_read": read,
                "floor_ms": {name: read / median(found[name]) / 1e6 for name in memory},
                "times_floor": {name: ratio(found["ar"], floor) for name, floor in floors.items()},
                "bandwidth_share": {name: ratio(floor, found["ar"]) for name, floor in floors.items()},
            },
            "verify": [
                {"width": width, "ms": milliseconds(found[width]), "times_plain": ratio(found[width], found[1])}
                for width in widths
            ],
            "draft": {
                "slots": slots,
                "ms": milliseconds(found["draft"]),
                "times_plain": ratio(found["draft"], found[1]),
            },
        }

    def generations(self, bar: tqdm) -> dict[str, dict]:
        """Per row, steps of whole generations from the prompt: timed as they are, told apart into parts, and traced."""
        operations: dict[object, Operation] = {}
        for text in self.decoders:
            operations[text, "plain"] = partial(self._generate, text, self.prompt, self.new_tokens)
            operations[text, "parts"] = partial(self._generate, text, self.prompt, self.new_tokens, parts=True)
            if self.target.device.type == "cuda":
                operations[text, "trace"] = partial(self._generate, text, self.prompt, self.new_tokens, traced=True)
        found = self._rounds(operations, bar)
        return {
            text: summary(found[text, "plain"], found[text, "parts"], found.get((text, "trace"), ()))
            for text in self.decoders
        }

    def _generate(
        self,
        text: str,
        prompt: list[int],
        new_tokens: int,
        parts: bool = False,
        traced: bool = False,
    ) -> dict:
        """Steps and seconds of one generation, prefill and leading steps not counted; when traced, of its beginning."""
        self._free()
        leading, trace = self._leading, DeviceTrace() if traced else None
        watch = Stopwatch(self.target.wait, parts, leading, trace)
        arguments = (prompt, new_tokens + leading, self.names[text], self.params, self.options[text])
        stream = self.decoders[text].stream(*arguments, ignore_eos=True)
        with watch.watching(), closing(stream):
            for _ in itertools.islice(stream, leading + TRACED_STEPS if traced else None):
                pass
        busy = None if trace is None else trace.busy_seconds
        return {"steps": watch.steps, "tokens": watch.tokens, "seconds": watch.seconds, "busy_seconds": busy}

    def _decode_behind(self, text: list[int]) -> dict:
        """Steps and seconds of plain decoding behind a long text that is in the cache as `_fill` puts it there."""
        self._free()
        watch = Stopwatch(self.target.wait, parts=False, leading=self._leading)
        request = GenerationRequest(
            text, AR_TOKENS + self._leading, self.names["ar"], self.params, self.options["ar"], ignore_eos=True
        )
        engine = self.ar.engine()
        sequence = self.ar.sequence(engine, check_arguments(self.ar, request))
        with linked(), self.target.patched():
            self._fill(sequence.cache, len(text) - 1)
        with watch.watching(), linked():
            while not sequence.done:
                engine.decode([sequence])
        return {"tokens": watch.tokens, "seconds": watch.seconds}

    @property
    def _leading(self) -> int:
        """Steps of a generation before the clock starts."""
        return LEADING_STEPS[self.target.device.type]

    def _free(self) -> None:
        """Make room for a generation: on CUDA the caches of the one before, and what was recorded over them, go."""
        if self.target.device.type == "cuda":
            gc.collect()

    def _fill(self, cache: FullCache, length: int) -> Mapping[int, torch.Tensor]:
        """Let an empty cache hold ``length`` tokens: the prompt's keys and values over and over.

        Returns:
            The queries of the prompt's last token, by layer.
        """
        queries = self.target.prefill(self.prompt[:length], cache, 1)
        while cache.length < length:
            start, count = cache.length, min(cache.length, length - cache.length)
            for buffer in (cache.keys, cache.values):
                buffer[:, :, :, start : start + count] = buffer[:, :, :, :count]
            cache.keep(range(count))
        return queries
