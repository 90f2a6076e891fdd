"""What users hold: a model with its tokenizer and heads, ready to generate."""

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoder.audit import Audit, audit
from decoder.draft_heads import DraftHeads
from decoder.drafters import METHODS, Resources
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.engine import Engine
from decoder.kernels.packed_linear import fast_bfloat16
from decoder.model.loading import HUB_ARGUMENTS, check_source, read_config, read_model, read_tokenizer
from decoder.model.target import Target
from decoder.options import TokenSwiftOptions
from decoder.sampling.acceptance import Independent, exact, exact_on_device
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import LogitsHook, Sampler
from decoder.stats import Statistics
from decoder.text.prompts import chat_ids, is_chat, text_ids
from decoder.text.stream import TextStream

Prompt = str | Sequence[int] | torch.Tensor | Sequence[Mapping[str, str]]
_REMEMBERED = 32  # settings for which it is kept what drafting has learnt
_DTYPES = ("float32", "bfloat16", "float16", "float64")
HeadsLike = DraftHeads | str | os.PathLike


def methods() -> list[str]:
    """Names that ``method`` takes, `ar` first."""
    return list(METHODS)


@dataclass(frozen=True)
class Request:
    """What a generation was asked for, as far as its text follows from it.

    Attributes:
        model: the model that generated it.
        prompt_ids: the prompt's token ids.
        sampling: how tokens were chosen.
        verification: the rule of `TokenSwiftOptions.verification`.
        logits_hook: the user's hook, if any.
    """

    model: PreTrainedModel = field(repr=False)
    prompt_ids: list[int]
    sampling: SamplingParams
    verification: str
    logits_hook: LogitsHook | None


@dataclass
class GenerationOutput:
    """A finished generation.

    Attributes:
        token_ids: the new tokens, a stop token included.
        text: their text, without special tokens and without a stop string; "" when there is no tokenizer.
        finish_reason: "length" or "stop".
        stats: what was counted and timed.
        request: what was asked for; `decoder.audit` reads it.
        logprobs: log-probability of each token under the filtered distribution, when asked for.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: Statistics
    request: Request
    logprobs: list[float] | None = None


@dataclass
class Chunk:
    """What one step added to a stream.

    Attributes:
        token_ids: the step's tokens.
        text: newly settled text, possibly "".
        stats: what was counted and timed so far; goes on counting with the next chunk.
        output: the whole result, on the last chunk only.
    """

    token_ids: list[int]
    text: str
    stats: Statistics
    output: GenerationOutput | None = None


class Decoder:
    """Lossless decoding with a Hugging Face causal model.

    The model is used as it is and left as it was. One decoder runs several generations one after another or
    interleaved, and several decoders may share a model; but since a step borrows the model, and on CUDA a function of
    its modelling file, nothing of one family of models is to be used from two threads at once. Closing a stream ends it
    and frees its caches.

    Args:
        model: a decoder-only model with standard attention.
        tokenizer: needed for text prompts, texts and stop strings.
        heads: draft heads: a module, a checkpoint folder or hub id, or {kind: any of these}.
        draft_model: a small model with the same vocabulary, for methods that draft with one.

    Raises:
        ValueError: the architecture cannot be served exactly, or tokenizer, heads or draft model are none or do not
            fit the model.
        OSError: a heads checkpoint cannot be read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        heads: HeadsLike | Mapping[str, HeadsLike] | None = None,
        draft_model: PreTrainedModel | None = None,
    ):
        if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"the tokenizer must be one of transformers, not {type(tokenizer).__name__}")
        _check_heads(heads)
        self.model, self.tokenizer, self.draft_model = model, tokenizer, draft_model
        self.target = Target(model)
        self.draft_target = None if draft_model is None else Target(draft_model)
        if self.draft_target is not None and self.draft_target.vocab_size != self.target.vocab_size:
            sizes = f"{self.draft_target.vocab_size} tokens, the model's {self.target.vocab_size}"
            raise ValueError(f"the draft model has another vocabulary: {sizes}")
        self.verify_costs = VerifyCosts(self.target)
        self._learnt: dict[tuple, dict[Hashable, object]] = {}
        self.heads: dict[str, DraftHeads] = {}
        given = heads.values() if isinstance(heads, Mapping) else [] if heads is None else [heads]
        for one in given:
            # A module of the user's own is copied: moving it in place would change it under them.
            module = deepcopy(one) if isinstance(one, DraftHeads) else DraftHeads.from_pretrained(one)
            module.check_fits(self.target.hidden_size)
            self.heads[module.kind] = module.to(self.target.device, self._heads_dtype(module)).eval()
            module.check_finite()
            self.target.speed_up(module)
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
        stop: str | int | Sequence[str | int] | None = None,
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
        stop: str | int | Sequence[str | int] | None = None,
        ignore_eos: bool = False,
        return_logprobs: bool = False,
        logits_hook: LogitsHook | None = None,
    ) -> Iterator[Chunk]:
        """`generate`, yielding a `Chunk` per step; arguments are checked at once, work begins with the first one.

        Weights that are changed between two chunks count from the next generation on.
        """
        sampling, options = sampling or SamplingParams(), options or TokenSwiftOptions()
        for name, value, kind in (("sampling", sampling, SamplingParams), ("options", options, TokenSwiftOptions)):
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
        for name, value in (("ignore_eos", ignore_eos), ("return_logprobs", return_logprobs)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, not {value!r}")
        if logits_hook is not None and not callable(logits_hook):
            raise ValueError(f"logits_hook must be a function, not {type(logits_hook).__name__}")
        context = self._prompt_ids(prompt)
        limit = self._length_limit(len(context), max_new_tokens)
        method, heads = self._method(method, options)
        stop_ids, stop_strings = self._stops(stop, ignore_eos)
        text = TextStream(self.tokenizer, stop_strings) if self.tokenizer is not None else None

        def ends(token: int) -> bool:
            if text is not None:
                text.push(token)
            return token in stop_ids or (text is not None and text.stopped)

        sampler = Sampler(
            sampling, self.target.vocab_size, self.target.device, context, logits_hook, keep_logprobs=return_logprobs
        )
        learnt = self._learnt_by(method, sampling, options.coupled)
        resources = Resources(
            self.target, heads, self.draft_target, sampling, options, context, self.verify_costs, limit, learnt
        )
        drafter = METHODS[method](resources)
        accept = exact
        if options.verification == "independent":
            accept = Independent(sampling.seed, self.target.device)
        elif self.target.device.type == "cuda" and logits_hook is None:
            accept = exact_on_device
        engine = Engine(self.target, drafter, sampler, limit, ends, accept, open_ended=max_new_tokens is None)
        return self._run(engine, text, Request(self.model, context, sampling, options.verification, logits_hook))

    def audit(self, output: GenerationOutput) -> Audit:
        """`decoder.audit`, which tells a floating-point tie from a fault."""
        return audit(output)

    def _run(self, engine: Engine, text: TextStream | None, request: Request) -> Iterator[Chunk]:
        engine.prefill()
        while True:
            tokens = [] if engine.finish_reason else engine.step()
            done = engine.finish_reason is not None
            piece = "" if text is None else text.take(final=done)
            output = None
            if done:
                sampler = engine.sampler
                output = GenerationOutput(
                    token_ids=sampler.context[len(request.prompt_ids) :],
                    text="" if text is None else text.text,
                    finish_reason=engine.finish_reason,
                    stats=engine.statistics,
                    request=request,
                    logprobs=sampler.logprobs,
                )
            yield Chunk(tokens, piece, engine.statistics, output)
            if done:
                return

    def _learnt_by(self, method: str, sampling: SamplingParams, coupled: bool) -> dict[Hashable, object]:
        """What a method has learnt from earlier texts with this sampling; the settings used last are kept."""
        key = method, replace(sampling, seed=0), coupled
        learnt = self._learnt.pop(key, {})
        kept = [(other, what) for other, what in self._learnt.items() if what][1 - _REMEMBERED :]
        self._learnt = {**dict(kept), key: learnt}
        return learnt

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer: give the Decoder one, or give token ids")
            ids = text_ids(prompt, self.tokenizer)
        elif is_chat(prompt):
            ids = chat_ids(prompt, self.tokenizer)
        elif isinstance(prompt, torch.Tensor):
            no_ids = prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool
            if no_ids or prompt.ndim not in (1, 2):
                raise ValueError("a prompt tensor holds integer token ids, of shape [n] or [1, n]")
            if prompt.ndim == 2 and len(prompt) != 1:
                raise ValueError(f"one prompt at a time: the batch has {len(prompt)}")
            ids = prompt.flatten().tolist()
        elif isinstance(prompt, Sequence) and all(type(i) is int for i in prompt) and not isinstance(prompt, bytes):
            ids = list(prompt)
        else:
            raise ValueError(
                "a prompt is text, chat messages, a list of integer token ids, or a LongTensor [n] or [1, n]"
            )
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        outside = next((i for i in ids if not 0 <= i < self.target.vocab_size), None)
        if outside is not None:
            raise ValueError(f"token id {outside} is outside the vocabulary of {self.target.vocab_size}")
        return ids

    def _length_limit(self, prompt_tokens: int, max_new_tokens: int | None) -> int:
        """How many tokens may be generated."""
        positions = self.model.config.max_position_embeddings
        wanted = max_new_tokens
        if wanted is None:
            wanted = max(0, positions - prompt_tokens)
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0:
            raise ValueError(f"max_new_tokens must be an integer of at least 0, or None, not {max_new_tokens!r}")
        if prompt_tokens + wanted > positions:
            raise ValueError(
                f"prompt ({prompt_tokens} tokens) + max_new_tokens ({wanted}) is beyond the {positions} positions "
                f"of the model: shorten one of them"
            )
        return wanted

    def _method(self, method: str | None, options: TokenSwiftOptions) -> tuple[str, DraftHeads | None]:
        if method is None and options.verification == "exact":
            method = "auto"
        elif method is None:
            method = "tokenswift" if self.heads else "prompt-lookup"
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
        kinds = METHODS[method].heads_kinds
        if not kinds:
            return method, None
        kind = next((kind for kind in kinds if kind in self.heads), None)
        if kind is None and METHODS[method].needs_heads:
            raise ValueError(
                f"method {method!r} needs draft heads ({' or '.join(kinds)}): give heads=, or use 'prompt-lookup'"
            )
        return method, self.heads.get(kind)

    def _stops(self, stop, ignore_eos: bool) -> tuple[set[int], list[str]]:
        given = [] if stop is None else [stop] if isinstance(stop, str | int) else stop
        if (
            not isinstance(given, Sequence)
            or isinstance(given, bytes | bytearray)
            or any(not isinstance(s, str | int) or isinstance(s, bool) or s == "" for s in given)
        ):
            raise ValueError(f"stop takes non-empty strings and token ids, not {stop!r}")
        outside = next((s for s in given if isinstance(s, int) and not 0 <= s < self.target.vocab_size), None)
        if outside is not None:
            raise ValueError(f"stop token id {outside} is outside the vocabulary of {self.target.vocab_size}")
        strings = [s for s in given if isinstance(s, str)]
        if strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the Decoder one, or stop at token ids")
        ids = {s for s in given if isinstance(s, int)}
        if not ignore_eos:
            config = getattr(self.model, "generation_config", None)
            eos = getattr(config, "eos_token_id", None)
            if eos is None and self.tokenizer is not None:
                eos = self.tokenizer.eos_token_id
            ids |= set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
        return ids, strings


def load(
    model: str | os.PathLike,
    heads: HeadsLike | Mapping[str, HeadsLike] | None = None,
    *,
    draft_model: str | os.PathLike | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    **model_kwargs,
) -> Decoder:
    """Load a model folder or hub id with its tokenizer, and heads, as a `Decoder`.

    Args:
        heads: a heads checkpoint folder or hub id, or {kind: checkpoint}.
        draft_model: folder or hub id of a small model with the same vocabulary.
        device: "auto" takes CUDA where there is one.
        dtype: "auto" is float32 on a CPU and the checkpoint's own on CUDA; else a torch dtype or its name.
        model_kwargs: handed to ``AutoModelForCausalLM.from_pretrained``; the hub's arguments among them also go to the
            tokenizer, the heads and the draft model, but ``revision``, which is the model's and its tokenizer's alone.

    Raises:
        OSError: a model, tokenizer or heads checkpoint that cannot be found or read.
        ValueError: one that does not fit or lacks tensors, or an unknown device or dtype.
    """
    device = device_named(device)
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in ("auto", *_DTYPES):
        raise ValueError(f"unknown dtype {dtype!r}: use one of auto, {', '.join(_DTYPES)}")
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    # transformers takes names as well, "auto" among them.
    check_source("model", model)
    if draft_model is not None:
        check_source("draft model", draft_model)
    _check_heads(heads)
    from_hub = {name: model_kwargs[name] for name in HUB_ARGUMENTS if name in model_kwargs}
    # Revisions are counted in each repository by itself: the given one is the model's.
    of_draft = {name: value for name, value in model_kwargs.items() if name != "revision"}
    of_heads = {name: from_hub[name] for name in ("cache_dir", "local_files_only", "token") if name in from_hub}

    def read_heads(one: HeadsLike) -> DraftHeads:
        return one if isinstance(one, DraftHeads) else DraftHeads.from_pretrained(one, **of_heads)

    if isinstance(heads, Mapping):
        heads = {kind: read_heads(one) for kind, one in heads.items()}
    elif heads is not None:
        heads = read_heads(heads)
    # What can be refused is, before gigabytes of weights are read.
    read_config(model, **from_hub)
    if draft_model is not None:
        read_config(draft_model, **{name: of_draft[name] for name in from_hub if name in of_draft})
    tokenizer = read_tokenizer(model, **from_hub)
    target = read_model(model, device, dtype=dtype, **model_kwargs)
    small = None if draft_model is None else read_model(draft_model, device, dtype=dtype, **of_draft)
    return Decoder(target, tokenizer, heads, small)


def device_named(device: str | torch.device) -> torch.device:
    """The device of that name, "auto" taking CUDA where there is one; a ValueError where this machine has none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, str | torch.device):
        raise ValueError(f"unknown device {device!r}: use 'auto', 'cpu' or 'cuda'")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}: use 'auto', 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported: use 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for and there is none: use 'auto' or 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {str(device)!r}: the last one is 'cuda:{torch.cuda.device_count() - 1}'")
    return device


def _check_heads(heads: object) -> None:
    """Raise ValueError for what can be no draft heads."""
    for one in heads.values() if isinstance(heads, Mapping) else [] if heads is None else [heads]:
        if not isinstance(one, DraftHeads | str | os.PathLike):
            raise ValueError(
                f"heads must be DraftHeads, a checkpoint folder or hub id, or {{kind: any of these}}, "
                f"not {type(one).__name__}"
            )
