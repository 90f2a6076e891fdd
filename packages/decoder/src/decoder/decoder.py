"""What users hold: a model with its tokenizer and heads, ready to generate."""

import os
from collections import abc
from collections.abc import Hashable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoder.arguments import Arguments, check_arguments, per_prompt
from decoder.audit import Audit, audit
from decoder.cache.full import FullCache
from decoder.draft_heads import DraftHeads
from decoder.drafters import METHODS, DrafterContext, drafter_class
from decoder.drafters.draft_vocabulary import DraftVocabulary
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.engine import Engine
from decoder.kernels.memory import available_memory
from decoder.kernels.packed_linear import fast_bfloat16
from decoder.model.bitwise import Wanted
from decoder.model.target import Target
from decoder.options import TokenSwiftOptions
from decoder.outputs import BatchError, Chunk, GenerationOutput, Request
from decoder.report import report
from decoder.sampling.acceptance import Independent, exact
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import LogitsHook, Sampler
from decoder.sequence import Sequence
from decoder.text.prompts import Prompt, is_chat
from decoder.text.stops import Stop
from decoder.text.stream import TextStream

HeadsLike = DraftHeads | str | os.PathLike

_REMEMBERED = 32  # settings for which it is kept what tuning has learnt
_MOST_TEXTS = 256  # decoded together, where memory sets no lower bound
_CACHE_SHARE = 0.6  # of the memory that is free, for the caches of a batch


def methods() -> list[str]:
    """Names that ``method`` takes, `ar` first."""
    return list(METHODS)


class Decoder:
    """Lossless decoding with a Hugging Face causal model.

    The model is used as it is and left as it was. One decoder runs several generations one after another or
    interleaved, and several decoders may share a model; but since a step patches the model, and on CUDA a function of
    its modelling file, nothing of one family of models is to be used from two threads at once. Closing a stream ends it
    and frees its caches.

    Args:
        model: a decoder-only model with standard attention.
        tokenizer: needed for text prompts, texts and stop strings.
        heads: draft heads: a module, a checkpoint folder or hub id, or {kind: any of these}.
        draft_model: a small model with the same vocabulary, for methods that draft with one.
        bitwise: whether a token's logits are to be the same bits whatever shares its pass, so that no rounding ever
            turns a text. "auto" does it where tests on this machine, of a second or so, show that it holds: on a CPU,
            in float32 and half precision.

    Raises:
        ValueError: the architecture cannot be served exactly; tokenizer, heads or draft model are none or do not fit
            the model; or bitwise is True and does not hold.
        OSError: a heads checkpoint cannot be read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        heads: HeadsLike | Mapping[str, HeadsLike] | None = None,
        draft_model: PreTrainedModel | None = None,
        bitwise: Wanted = "auto",
    ):
        if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"the tokenizer must be one of transformers, not {type(tokenizer).__name__}")
        check_heads(heads)
        self.model, self.tokenizer, self.draft_model = model, tokenizer, draft_model
        self.target = Target(model)
        self.draft_target = None if draft_model is None else Target(draft_model)
        if self.draft_target is not None and self.draft_target.vocab_size != self.target.vocab_size:
            sizes = f"{self.draft_target.vocab_size} tokens, the model's {self.target.vocab_size}"
            raise ValueError(f"the draft model has another vocabulary: {sizes}")
        self.target.make_bitwise(bitwise)
        self.verify_costs = VerifyCosts(self.target)
        self._tuning_states: dict[tuple, dict[Hashable, object]] = {}
        self.heads: dict[str, DraftHeads] = {}
        given = heads.values() if isinstance(heads, Mapping) else [] if heads is None else [heads]
        for one in given:
            # A module of the user's own is copied: moving it in place would change it under them.
            module = deepcopy(one) if isinstance(one, DraftHeads) else DraftHeads.from_pretrained(one)
            module.check_fits(self.target.hidden_size, self.target.vocab_size)
            self.heads[module.kind] = module.to(self.target.device, self._heads_dtype(module)).eval()
            module.check_finite()
            self.target.speed_up(module)
            # Copied here, and not in the first step.
            DraftVocabulary.of(self.target, module)
        if isinstance(heads, Mapping) and set(heads) != set(self.heads):
            raise ValueError(
                f"heads were given as {', '.join(map(str, heads))} but are of kind {', '.join(self.heads)}"
            )

    def _heads_dtype(self, heads: DraftHeads) -> torch.dtype:
        """The model's own, but on a CPU bfloat16 as it was saved: reading the weights is most of a head's time."""
        wanted = self.target.lm_head.weight.dtype
        saved = {parameter.dtype for parameter in heads.parameters()}
        if saved == {torch.bfloat16} and wanted == torch.float32 and fast_bfloat16(self.target.device):
            return torch.bfloat16
        return wanted

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None,
        method: str | None = None,
        sampling: SamplingParams | None = None,
        options: TokenSwiftOptions | None = None,
        stop: Stop = None,
        ignore_eos: bool = False,
        return_logprobs: bool = False,
        logits_hook: LogitsHook | None = None,
    ) -> GenerationOutput:
        """Generate up to ``max_new_tokens`` tokens; the same seed gives the same tokens with every method.

        Args:
            prompt: text, token ids, a LongTensor [n] or [1, n], or chat messages ({"role": ..., "content": ...} each)
                for the tokenizer's chat template.
            max_new_tokens: exact, unless a stop ends the text before; None goes on until a stop or the model's last
                position, in a cache that grows with the text.
            method: one of `decoder.methods()`; None takes `auto`, and where the text would follow the method
                (`options.verification`) `tokenswift`, or `prompt-lookup` without heads.
            sampling: defaults to `SamplingParams()`.
            options: how to draft, defaults to `TokenSwiftOptions()`; changes the speed only (but see ``verification``).
            stop: stop strings and/or token ids that end the text.
            ignore_eos: do not end at the end-of-sequence ids of the generation config or the tokenizer.
            return_logprobs: give each token's log-probability under the filtered distribution.
            logits_hook: ``hook(context_ids, logits [V]) -> logits [V]`` per position, before the penalty.

        Raises:
            ValueError: an unusable prompt, length, method or stop; the message says what to change.
        """
        arguments = (prompt, max_new_tokens, method, sampling, options, stop, ignore_eos, return_logprobs, logits_hook)
        output = None
        for chunk in self.stream(*arguments):
            output = chunk.output
        return output

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None,
        method: str | None = None,
        sampling: SamplingParams | None = None,
        options: TokenSwiftOptions | None = None,
        stop: Stop = None,
        ignore_eos: bool = False,
        return_logprobs: bool = False,
        logits_hook: LogitsHook | None = None,
    ) -> Iterator[Chunk]:
        """`generate`, yielding a `Chunk` per step; arguments are checked at once, work begins with the first one.

        Weights that are changed between two chunks count from the next generation on.
        """
        asked = check_arguments(
            self, prompt, max_new_tokens, method, sampling, options, stop, ignore_eos, return_logprobs, logits_hook
        )
        engine = Engine(self.target)
        return self._run(engine, self._sequence(engine, asked))

    def _run(self, engine: Engine, text: Sequence) -> Iterator[Chunk]:
        engine.add(text)
        while True:
            [(_, tokens)] = engine.step()
            if text.error is not None:
                raise text.error
            chunk = text.chunk(tokens)
            yield chunk
            if chunk.output is not None:
                return

    def generate_batch(
        self,
        prompts: abc.Sequence[Prompt],
        max_new_tokens: int | abc.Sequence[int | None] | None,
        method: str | None = None,
        sampling: SamplingParams | abc.Sequence[SamplingParams | None] | None = None,
        options: TokenSwiftOptions | None = None,
        stop: Stop | abc.Sequence[Stop] = None,
        ignore_eos: bool = False,
        return_logprobs: bool = False,
        logits_hook: LogitsHook | abc.Sequence[LogitsHook | None] | None = None,
        max_batch: int | None = None,
    ) -> list[GenerationOutput]:
        """`generate` for many prompts, decoded together: each step verifies the trees of all texts in one pass.

        Each text is the one it would be alone. A text that has ended leaves, a waiting one joins.

        Args:
            prompts: in any of the forms that `generate` takes.
            max_new_tokens, sampling, logits_hook: one for all, or a list with one per prompt.
            stop: one for all, as in `generate`; or a list with one of these or None per prompt, of which at least one
                is None or a list.
            max_batch: how many texts are decoded together at most; None takes as many as memory has room for, up to
                256.

        Returns:
            The outputs in the order of the prompts.

        Raises:
            ValueError: an unusable argument, before any work; the message names the prompt's index.
            BatchError: some texts failed while they were generated; the others' outputs are in its ``outputs``.
        """
        arguments = (prompts, max_new_tokens, method, sampling, options, stop, ignore_eos, return_logprobs, logits_hook)
        outputs: dict[int, GenerationOutput] = {}
        for index, chunk in self.stream_batch(*arguments, max_batch):
            if chunk.output is not None:
                outputs[index] = chunk.output
        return [outputs[index] for index in range(len(outputs))]

    def stream_batch(
        self,
        prompts: abc.Sequence[Prompt],
        max_new_tokens: int | abc.Sequence[int | None] | None,
        method: str | None = None,
        sampling: SamplingParams | abc.Sequence[SamplingParams | None] | None = None,
        options: TokenSwiftOptions | None = None,
        stop: Stop | abc.Sequence[Stop] = None,
        ignore_eos: bool = False,
        return_logprobs: bool = False,
        logits_hook: LogitsHook | abc.Sequence[LogitsHook | None] | None = None,
        max_batch: int | None = None,
    ) -> Iterator[tuple[int, Chunk]]:
        """`generate_batch`, yielding (the prompt's index, its `Chunk`) as they come."""
        if isinstance(prompts, str | bytes | torch.Tensor) or not isinstance(prompts, abc.Sequence) or is_chat(prompts):
            raise ValueError("prompts must be a list with a prompt per text")
        if not prompts:
            raise ValueError("there are no prompts: give at least one")
        if max_batch is not None and (type(max_batch) is not int or max_batch < 1):
            raise ValueError(f"max_batch must be an integer of at least 1, or None, not {max_batch!r}")
        count = len(prompts)
        columns = zip(
            prompts,
            per_prompt("max_new_tokens", max_new_tokens, count),
            per_prompt("sampling", sampling, count),
            per_prompt("stop", stop, count, listed=lambda each: each is None or isinstance(each, list | tuple)),
            per_prompt("logits_hook", logits_hook, count),
            strict=True,
        )
        asked = []
        # A batch has caches of its own.
        self.target.pool.clear()
        memory = available_memory(self.target.device)
        for index, (prompt, length, params, stops, hook) in enumerate(columns):
            try:
                one = check_arguments(
                    self, prompt, length, method, params, options, stops, ignore_eos, return_logprobs, hook
                )
                asked.append(one)
                needed = self._cache_bytes(one)
                if memory is not None and needed > _CACHE_SHARE * memory:
                    raise ValueError(
                        f"its cache of {needed:,} bytes does not fit the memory: shorten it or max_new_tokens"
                    )
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return self._run_batch(asked, max_batch or _MOST_TEXTS, memory)

    def _run_batch(self, asked: list[Arguments], max_batch: int, memory: int | None) -> Iterator[tuple[int, Chunk]]:
        planned: dict[Sequence, int] = {}

        def fits(running: list[Sequence], candidate: Sequence) -> bool:
            if len(running) >= max_batch:
                return False
            return memory is None or sum(map(planned.get, [*running, candidate])) <= _CACHE_SHARE * memory

        engine = Engine(self.target, fits)
        index_of: dict[Sequence, int] = {}
        outputs: list[GenerationOutput | None] = [None] * len(asked)
        errors: dict[int, Exception] = {}
        pending = list(enumerate(asked))[::-1]
        while pending or engine.running or engine.waiting:
            # Not all at once: a sequence that waits holds its noise and its drafter's index already.
            while pending and len(engine.running) + len(engine.waiting) < max_batch:
                index, one = pending.pop()
                text = self._sequence(engine, one)
                index_of[text], planned[text] = index, self._cache_bytes(one)
                engine.add(text)
            for text, tokens in engine.step():
                index = index_of[text]
                if text.error is not None:
                    errors[index] = text.error
                    continue
                chunk = text.chunk(tokens)
                outputs[index] = chunk.output
                yield index, chunk
        if errors:
            raise BatchError(outputs, errors)

    @property
    def bitwise(self) -> bool:
        """Whether the bits of a token's logits depend on the tokens before it alone; `report` tells why not."""
        return self.target.bitwise.rule is not None

    def audit(self, output: GenerationOutput) -> Audit:
        """`decoder.audit`, which tells a floating-point tie from a fault."""
        return audit(output)

    def report(self) -> str:
        """Versions, the device, and which fast paths are used on it and why not: what belongs into an issue."""
        targets = {"model": self.target}
        if self.draft_target is not None:
            targets["draft model"] = self.draft_target
        return report(targets, self.heads)

    def _sequence(self, engine: Engine, asked: Arguments) -> Sequence:
        """A text that is to be decoded by ``engine``."""
        target, options, hook = self.target, asked.options, asked.logits_hook
        sampler = Sampler(
            asked.sampling, target.vocab_size, target.device, asked.context, hook, keep_logprobs=asked.return_logprobs
        )
        drafter = drafter_class(asked.method, options)(
            DrafterContext(
                target,
                asked.heads,
                self.draft_target,
                asked.sampling,
                options,
                asked.context,
                self.verify_costs,
                asked.limit,
                self._tuning_state(asked.method, asked.sampling, options.coupled),
                running=lambda: max(1, len(engine.running)),
            )
        )
        exactly = options.verification == "exact"
        smallest = len(asked.context) + target.width(drafter.max_nodes)
        return Sequence(
            Request(self.model, asked.context, asked.sampling, options.verification, hook),
            sampler,
            drafter,
            FullCache(smallest if asked.open_ended else smallest + asked.limit, growable=asked.open_ended),
            asked.limit,
            asked.stop_ids,
            None if self.tokenizer is None else TextStream(self.tokenizer, asked.stop_strings),
            exact if exactly else Independent(asked.sampling.seed, target.device),
            # The host is slow to hear from a GPU; a hook runs on the host, along the path that is taken.
            draws_whole_trees=exactly and hook is None and target.draws_whole_trees,
        )

    def _cache_bytes(self, asked: Arguments) -> int:
        """Bytes of the full cache at its longest, and of a draft cache of the usual budget beside it."""
        return self.target.kv_bytes * (len(asked.context) + asked.limit + asked.options.budget_for(len(asked.context)))

    def _tuning_state(self, method: str, sampling: SamplingParams, coupled: bool) -> dict[Hashable, object]:
        """What a method has learnt from earlier texts with this sampling; the settings used last are kept."""
        key = method, replace(sampling, seed=0), coupled
        state = self._tuning_states.pop(key, {})
        kept = [(other, what) for other, what in self._tuning_states.items() if what][1 - _REMEMBERED :]
        self._tuning_states = {**dict(kept), key: state}
        return state


def check_heads(heads: object) -> None:
    """Raise ValueError for what can be no draft heads."""
    for one in heads.values() if isinstance(heads, Mapping) else [] if heads is None else [heads]:
        if not isinstance(one, DraftHeads | str | os.PathLike):
            raise ValueError(
                f"heads must be DraftHeads, a checkpoint folder or hub id, or {{kind: any of these}}, "
                f"not {type(one).__name__}"
            )
