"""One generation of a row, step by step: by the decoder, or by transformers' own generate."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

import decoder
from decoder.parts import stream_on
from ts_eval.comparing.method_spec import ENDPOINT, HF, HF_ASSISTED, LLAMA
from ts_eval.comparing.progress import COUNTS, counts_of

OnStep = Callable[[Sequence[int], dict, Sequence[float] | None], None]
"""Is told a step's tokens, the counts so far, and the tokens' log-probabilities if these were asked for."""


def continue_with_decoder(
    dec: "decoder.Decoder",
    method: str,
    prompt: Sequence[int],
    sofar: Sequence[int],
    max_new_tokens: int,
    sampling: "decoder.SamplingParams",
    options: "decoder.TokenSwiftOptions",
    stop_ids: Collection[int],
    on_step: OnStep,
    logprobs: bool = False,
) -> None:
    """Generate what ``sofar`` lacks of ``max_new_tokens`` tokens, or up to one of ``stop_ids``, as if never cut."""
    arguments = (dec, prompt, sofar, max_new_tokens, method, sampling, options)
    stream = stream_on(*arguments, ignore_eos=not stop_ids, return_logprobs=logprobs)
    with closing(stream):
        for chunk in stream:
            if chunk.token_ids:
                on_step(chunk.token_ids, counts_of(chunk.stats), chunk.logprobs)


def continue_batch_with_decoder(
    dec: "decoder.Decoder",
    method: str,
    prompts: Sequence[Sequence[int]],
    sofar: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: "Sequence[decoder.SamplingParams]",
    options: "decoder.TokenSwiftOptions",
    stop_ids: Sequence[Collection[int]],
    on_step: Callable[[int, Sequence[int], dict, Sequence[float] | None], None],
    logprobs: bool = False,
) -> None:
    """`continue_with_decoder` for several texts, decoded together; ``on_step`` is also given the text's index.

    ``stop_ids`` are each text's own. Raises BatchError when some of them failed; the others have been generated to
    their ends.
    """
    if options.budget is None and any(sofar):
        # The default is the prompt's length, which must not grow with the text; all texts share these options.
        options = replace(options, budget=max(options.budget_for(len(prompt)) for prompt in prompts))
    contexts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, sofar, strict=True)]
    lengths = [max_new_tokens - len(tokens) for tokens in sofar]
    stops = [sorted(ids) for ids in stop_ids]
    stream = dec.stream_batch(
        contexts, lengths, method, list(sampling), options, stops, True, logprobs, max_batch=len(contexts)
    )
    with closing(stream):
        for index, chunk in stream:
            if chunk.token_ids:
                on_step(index, chunk.token_ids, counts_of(chunk.stats), chunk.logprobs)


def continue_with_transformers(
    model,
    method: str,
    prompt: Sequence[int],
    sofar: Sequence[int],
    max_new_tokens: int,
    sampling: "decoder.SamplingParams",
    stop_ids: Collection[int],
    on_step: OnStep,
    draft_model=None,
) -> None:
    """Generate what ``sofar`` lacks with ``model.generate``; when sampling it must be empty (see `can_continue`).

    ``draft_model`` is the assistant of hf-assisted.
    The repetition penalty is transformers' own, over the whole text. The first step's tokens come out of the pass over
    the prompt, so its time is counted as prefill. The random state outside is left alone.
    """
    ids = torch.tensor([[*prompt, *sofar]], device=model.device)
    assistant = draft_model if method == HF_ASSISTED else None
    bare = _bare_generation_config(model), _bare_generation_config(assistant)
    with bare[0], bare[1], _silent_transformers(), torch.random.fork_rng():
        torch.manual_seed(sampling.seed)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=_Steps(on_step),
            max_new_tokens=max_new_tokens - len(sofar),
            eos_token_id=sorted(stop_ids) or None,
            **hf_arguments(sampling),
            **HF[method],
            **({} if assistant is None else {"assistant_model": assistant}),
        )


def can_continue(method: str, sampling: "decoder.SamplingParams", options: "decoder.TokenSwiftOptions") -> bool:
    """Whether a cut generation goes on to the same text.

    It does not where the noise is a sequence and no function of the position: when transformers samples, and under
    independent verification. A server is only timed, and llama.cpp penalises what it has generated itself.
    """
    if method in (ENDPOINT, *LLAMA):
        return False
    return sampling.greedy if method in HF else options.verification == "exact"


def hf_arguments(sampling: "decoder.SamplingParams") -> dict:
    """The arguments of transformers' generate that ask for ``sampling``, the penalty window aside."""
    suppressed = {"suppress_tokens": list(sampling.suppress_tokens)} if sampling.suppress_tokens else {}
    if sampling.greedy:
        return {"do_sample": False, "repetition_penalty": sampling.repetition_penalty, **suppressed}
    return {
        **suppressed,
        "do_sample": True,
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": float(sampling.top_p),
        "min_p": sampling.min_p or None,
        "eta_cutoff": float(sampling.eta_cutoff),
        "repetition_penalty": float(sampling.repetition_penalty),
    }


def same_sampling_in_transformers(sampling: "decoder.SamplingParams", length: int) -> bool:
    """Whether transformers' text of ``length`` tokens, prompt included, must be ar's: greedy, the same penalty."""
    return sampling.greedy and (sampling.repetition_penalty == 1 or sampling.penalty_window >= length)


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Without the warnings that assisted generation gives of how it calls itself."""
    kept = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(kept)


@contextmanager
def _bare_generation_config(model) -> Iterator[None]:
    """The model, if there is one, without its checkpoint's own sampling defaults and end-of-text ids, for a while."""
    if model is None:
        yield
        return
    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


class StepClock:
    """Hands each step's tokens on, with the time since the first one, which comes out of the pass over the prompt.

    What is done with the tokens is not counted.
    """

    def __init__(self, on_step: OnStep):
        self._on_step = on_step
        self._counts = dict.fromkeys(COUNTS)
        self.start()

    def start(self) -> None:
        """Begin to count from now."""
        self._waited_since = time.perf_counter()

    def step(self, tokens: Sequence[int], seconds: float | None = None, **counts: int) -> None:
        """A step, of ``seconds`` if its maker knows them, and the sums of `COUNTS` that are known behind it."""
        if seconds is None:
            seconds = time.perf_counter() - self._waited_since
        if self._counts["steps"] is None:
            self._counts |= {"steps": 0, "prefill_seconds": seconds, "decode_seconds": 0.0, "shared_seconds": 0.0}
        else:
            self._counts["decode_seconds"] += seconds
            self._counts["shared_seconds"] += seconds
        self._counts["steps"] += 1
        self._counts |= counts
        self._on_step(tokens, dict(self._counts), None)
        self.start()


class _Steps(BaseStreamer):
    """The steps of transformers' generate."""

    def __init__(self, on_step: OnStep):
        self._clock = StepClock(on_step)
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        # Tokens arrive on the CPU, that is after the device has computed them.
        if self._prompt_seen:
            self._clock.step(value.flatten().tolist())
        else:
            self._clock.start()
        self._prompt_seen = True

    def end(self) -> None:
        pass
