"""The class that users work with: a model with its tokenizer and draft heads, ready to generate."""

from collections.abc import Generator, Hashable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoder.admission import Admission, CacheBytes, memory_for_caches
from decoder.arguments import Arguments, check_arguments
from decoder.assistant.model import AssistantModel
from decoder.auditing import Audit, audit
from decoder.backends.bitwise import BitwiseSetting
from decoder.cache.draft_layer import DraftLayerCache
from decoder.cache.form import CacheForm
from decoder.cache.full import FullCache
from decoder.draft_layer import DraftLayer
from decoder.drafters import METHODS, reads_text
from decoder.drafters.draft_vocabulary import DraftVocabulary
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.engine import Engine
from decoder.heads import MTP, Heads, HeadsLike, check_heads, load_built_in, load_heads
from decoder.model.target import Target
from decoder.model.vocabularies import refuse_other_size
from decoder.new_sequence import new_sequence
from decoder.outputs import BatchError, Chunk, GenerationOutput
from decoder.prefix_reuse import PrefixReuse, prefix_reuse
from decoder.report import report
from decoder.request import BatchRequest, GenerationRequest, asked_with
from decoder.scheduler import Fits
from decoder.sequence import Sequence
from decoder.text.prompts import check_sanitizes

_MOST_TUNING_STATES = 32  # tuning states that are remembered, one for each combination of settings
_MOST_TEXTS = 256  # texts that are decoded together at most; memory may set a lower bound


def methods() -> list[str]:
    """The names that the argument ``method`` takes, `ar` first."""
    return list(METHODS)


class Decoder:
    """Lossless decoding with a Hugging Face causal model.

    The model is used as it is and left as it was. One decoder can run several generations one after another or
    interleaved, and several decoders can share a model. But a step patches the model while it runs, and on CUDA also a
    function of its modelling file, so two threads must not use models of the same family at once. Closing a stream ends
    its generation and frees its caches.

    Args:
        model: a decoder-only model with standard attention.
        tokenizer: needed for prompts that are text, for text output and for stop strings.
        heads: draft heads: a module, a checkpoint folder or hub id, or {kind: any of these}; "mtp" is what the model
            has built in.
        draft_model: a small model with the same vocabulary, for methods that draft with one: `draft-model`, `auto` and
            `triforce`. The number of its logits may be another one, by padding behind the tokenizer's tokens.
        bitwise: whether a token's logits must have the same bits whatever else is in its pass, so that no rounding can
            ever change a text. "auto" switches this on where tests of about a second show that it holds, which can be
            on a CPU, in float32 and half precision; on CUDA it must be True.
        prefix_cache_bytes: how much of the caches of texts that have ended is kept, for prompts that begin like them;
            0 keeps nothing. See `PrefixReuse`.
        sanitize_control_tokens: whether control tokens in the messages of a chat, such as ``<|im_end|>``, are text, as
            in transformers; otherwise whoever writes a message can end it and write further turns. Prompts that are
            text, and not chats, are taken as they are.

    Raises:
        ValueError: the architecture cannot be decoded exactly; tokenizer, heads or draft model have a wrong type or do
            not fit the model; or bitwise is True and does not hold here.
        OSError: a heads checkpoint cannot be read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        heads: HeadsLike | Mapping[str, HeadsLike] | None = None,
        draft_model: PreTrainedModel | None = None,
        bitwise: BitwiseSetting = "auto",
        prefix_cache_bytes: int = 0,
        sanitize_control_tokens: bool = False,
    ):
        if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"the tokenizer must be one of transformers, not {type(tokenizer).__name__}")
        if sanitize_control_tokens and tokenizer is not None:
            check_sanitizes(tokenizer)
        check_heads(heads)
        self.sanitize_control_tokens = sanitize_control_tokens
        self.model, self.tokenizer, self.draft_model = model, tokenizer, draft_model
        self.target = Target(model)
        self.draft_target = None if draft_model is None else Target(draft_model)
        if self.draft_target is not None:
            refuse_other_size(self.target.vocab_size, self.draft_target.vocab_size, tokenizer)
        self.target.make_bitwise(bitwise)
        self.prefixes: PrefixReuse | None = prefix_reuse(self.target, prefix_cache_bytes)
        self.verify_costs = VerifyCosts(self.target)
        self._tuning_states: dict[tuple, dict[Hashable, Any]] = {}
        self.heads: dict[str, Heads] = {}
        given = heads.values() if isinstance(heads, Mapping) else [] if heads is None else [heads]
        with self.target.gathering():
            for one in given:
                # A module of the user's own is copied: moving it in place would change it under them.
                if isinstance(one, Heads):
                    module: Heads = deepcopy(one)
                else:
                    module = load_built_in(model.name_or_path) if one == MTP else load_heads(one)
                if isinstance(module, DraftLayer):
                    module.check_fits(self.target.hidden_size, self.target.vocab_size, self.target.layers)
                    if module.target_layers is not None:
                        if self.target.feature_layers:
                            raise ValueError("heads of kinds eagle3 and dflash both read layers of the model: give one")
                        self.target.read_features(module.target_layers)
                else:
                    module.check_fits(self.target.hidden_size, self.target.vocab_size)
                if isinstance(module, AssistantModel):
                    if self.target.ranks.size > 1:
                        raise ValueError(
                            "processes that share a model have a part of its cache each: leave out the assistant"
                        )
                    module.check_attends(self.target.layout, self.target.attention_shapes)
                self.heads[module.kind] = module.to(self.target.device, self.target.dtype).eval()
                module.check_finite()
                self.target.speed_up(module)
                # Its copy of rows of the language-model head is made now, and not in the first step.
                DraftVocabulary.of(self.target, module)
        if isinstance(heads, Mapping) and set(heads) != set(self.heads):
            raise ValueError(
                f"heads were given as {', '.join(map(str, heads))} but are of kind {', '.join(self.heads)}"
            )

    @asked_with(GenerationRequest)
    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Generate up to ``max_new_tokens`` tokens; the same seed gives the same tokens with every method.

        Args:
            request: the fields of a `GenerationRequest`, by position or by name, such as ``generate(prompt, 100,
                stop="END")``.

        Raises:
            ValueError: an unusable prompt, length, method or stop; the message says what to change.
        """
        output = None
        for chunk in self.stream(**vars(request)):
            output = chunk.output
        assert output is not None
        return output

    @asked_with(GenerationRequest)
    def stream(self, request: GenerationRequest) -> Generator[Chunk, None, None]:
        """`generate`, yielding a `Chunk` per step; arguments are checked at once, work begins with the first chunk.

        Weights that are changed between two chunks take effect in the next generation.
        """
        checked = check_arguments(self, request)
        engine = self.engine()
        return self._run(engine, self.sequence(engine, checked))

    def _run(self, engine: Engine, sequence: Sequence) -> Generator[Chunk, None, None]:
        engine.add(sequence)
        while True:
            [(_, tokens)] = engine.step()
            if sequence.error is not None:
                raise sequence.error
            chunk = sequence.chunk(tokens)
            try:
                yield chunk
            except GeneratorExit:
                # A stream that is closed is a text that has ended, too.
                engine.cancel(sequence)
                raise
            if chunk.output is not None:
                return

    @asked_with(BatchRequest)
    def generate_batch(self, request: BatchRequest) -> list[GenerationOutput]:
        """`generate` for many prompts, decoded together: each step verifies the trees of all texts in one pass.

        Each text is the one it would be alone. A text that has ended leaves, a waiting one joins.

        Args:
            request: the fields of a `BatchRequest`, by position or by name.

        Returns:
            The outputs in the order of the prompts.

        Raises:
            ValueError: an unusable argument, before any work; the message names the prompt's index.
            BatchError: some texts failed while they were generated; the others' outputs are in its ``outputs``.
        """
        outputs: dict[int, GenerationOutput] = {}
        for index, chunk in self.stream_batch(**vars(request)):
            if chunk.output is not None:
                outputs[index] = chunk.output
        return [outputs[index] for index in range(len(outputs))]

    @asked_with(BatchRequest)
    def stream_batch(self, request: BatchRequest) -> Generator[tuple[int, Chunk], None, None]:
        """`generate_batch`, yielding (the prompt's index, its `Chunk`) as they come."""
        requests = request.each()
        checked = []
        # Buffers that wait for a single text would take memory from the caches of the batch.
        self.target.pool.clear()
        ranks = self.target.ranks
        ranks.refuse_unequal({"number of prompts": len(requests), "max_batch": request.max_batch})
        memory = memory_for_caches(self.target.device, self.prefixes)
        # The processes of one machine share its host memory.
        memory = CacheBytes(ranks.least(memory.device), ranks.least(memory.host) // ranks.size)
        admission = Admission(request.max_batch or _MOST_TEXTS, memory)
        for index, own in enumerate(requests):
            try:
                one = check_arguments(self, own)
                checked.append(one)
                admission.check(self.cache_bytes(one))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return self._run_batch(checked, admission)

    def _run_batch(self, arguments: list[Arguments], admission: Admission) -> Generator[tuple[int, Chunk], None, None]:
        engine = self.engine(admission)
        index_of: dict[Sequence, int] = {}
        outputs: list[GenerationOutput | None] = [None] * len(arguments)
        errors: dict[int, Exception] = {}
        pending = list(enumerate(arguments))[::-1]
        while pending or engine.running or engine.waiting:
            # Sequences are made when they may soon run: one that waits already holds noise and its drafter's index.
            while pending and len(engine.running) + len(engine.waiting) < admission.max_batch:
                index, one = pending.pop()
                try:
                    sequence = self.sequence(engine, one)
                except ValueError as error:  # what only a sampler or a drafter finds
                    errors[index] = error
                    continue
                index_of[sequence] = index
                admission.plan(sequence, partial(self.cache_bytes, one))
                engine.add(sequence)
            for sequence, tokens in engine.step():
                index = index_of[sequence]
                if sequence.done:
                    # Its caches go with the last reference to it.
                    del index_of[sequence]
                if sequence.error is not None:
                    errors[index] = sequence.error
                    continue
                chunk = sequence.chunk(tokens)
                outputs[index] = chunk.output
                yield index, chunk
        if errors:
            raise BatchError(outputs, errors)

    @property
    def bitwise(self) -> bool:
        """Whether the bits of a token's logits depend only on the tokens before it; if not, `report` says why."""
        return self.target.bitwise.holds

    def audit(self, output: GenerationOutput) -> Audit:
        """Score a finished generation again, to tell a floating-point tie from a fault; see `decoder.audit`."""
        return audit(output)

    def report(self) -> str:
        """What belongs into an issue: versions, the device, what runs its models, and why not the rest."""
        targets = {"model": self.target}
        if self.draft_target is not None:
            targets["draft model"] = self.draft_target
        return report(targets, self.heads)

    def engine(self, fits: Fits | None = None, short_steps: bool = False) -> Engine:
        """An engine for sequences of this decoder; the arguments are those of `Scheduler`."""
        return Engine(self.target, fits, self.prefixes, short_steps)

    def sequence(self, engine: Engine, arguments: Arguments) -> Sequence:
        """The sequence, to be decoded by ``engine``, that the arguments ask for."""
        return new_sequence(self, engine, arguments)

    def cache_bytes(self, arguments: Arguments, sequence: Sequence | None = None) -> CacheBytes:
        """Bytes of the full cache at its longest, plus draft caches: of the default budget, of a draft layer or model.

        Of a text of open length that can be preempted, it is the full cache when it has grown once more. ``sequence``
        is that of the arguments, if it is made.
        """
        target, options, prompt = self.target, arguments.options, len(arguments.context)
        form, sizes = CacheForm.of(options), (target.attention_shape, len(target.layout.full), target.device)
        cache = FullCache(prompt, growable=True) if sequence is None else sequence.cache
        tokens = prompt + arguments.limit
        if arguments.open_ended and options.verification == "exact":
            before = 0 if sequence is None else sequence.planned_positions
            tokens = min(tokens, max(before, cache.next_capacity))
        on_device, on_host = (each(*sizes, tokens=tokens) for each in (form.device_bytes, form.host_bytes))
        on_device += target.beside_bytes(tokens) + target.kv_bytes * options.budget_for(prompt)
        if isinstance(arguments.heads, DraftLayer):
            on_device += DraftLayerCache.planned_bytes(arguments.heads, tokens)
        if self.draft_target is not None and reads_text(arguments.method):
            on_device += self.draft_target.kv_bytes * tokens + self.draft_target.beside_bytes(tokens)
        return CacheBytes(on_device, on_host)

    def tuning_state(self, arguments: Arguments) -> dict[Hashable, Any]:
        """The state that a method's tuning has collected from earlier texts with these settings, empty at first.

        The states of the settings that were used last are remembered.
        """
        options = arguments.options
        key = arguments.method, replace(arguments.sampling, seed=0), options.coupled, CacheForm.of(options)
        state = self._tuning_states.pop(key, {})
        others = [(other, earlier) for other, earlier in self._tuning_states.items() if earlier]
        self._tuning_states = {**dict(others[1 - _MOST_TUNING_STATES :]), key: state}
        return state
