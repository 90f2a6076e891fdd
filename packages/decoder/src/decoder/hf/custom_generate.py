"""The decoding loop that `model.generate(..., custom_generate=...)` calls in place of transformers' own."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer, TextStreamer

from decoder.decoder import Decoder
from decoder.heads import HeadsLike, check_heads
from decoder.hf.inputs import refuse_unsupported, unpadded
from decoder.hf.processors import as_hook, sampling_fields
from decoder.options import TokenSwiftOptions
from decoder.sampling.params import SamplingParams
from decoder.text.stream import REPLACEMENT, end_of_text

_NATIVE_STOPS = (MaxLengthCriteria, EosTokenCriteria)


def custom_generate(
    heads: HeadsLike | Mapping[str, HeadsLike] | None = None,
    method: str | None = None,
    options: TokenSwiftOptions | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> "CustomGenerate":
    """A decoding loop for ``model.generate(**inputs, custom_generate=decoder.custom_generate(...))``.

    Keep the result to generate again: the decoder that it makes of the model is kept with it.

    Args:
        heads, method, options: as for `Decoder` and `Decoder.generate`.
        streamer: gets the prompt and then each new token; `end` is called however the generation ends. It is given
            here since transformers does not hand its own argument of that name to a callable. One of transformers' that
            skips the prompt shows what the tokens add to the prompt's text, which may begin with a space.
        tokenizer: needed for ``model.generate(..., stop_strings=...)``, for the same reason.

    Raises:
        ValueError: an argument has a wrong type.
    """
    check_heads(heads)
    if streamer is not None and not isinstance(streamer, BaseStreamer):
        raise ValueError(f"the streamer must be one of transformers, not {type(streamer).__name__}")
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"the tokenizer must be one of transformers, not {type(tokenizer).__name__}")
    return CustomGenerate(heads, method, options, streamer, tokenizer)


class CustomGenerate:
    """What `custom_generate` returns; transformers calls it with what `generate` has prepared.

    Attributes:
        decoder: the `Decoder` of the last model that was generated with; None before.
    """

    def __init__(
        self,
        heads: HeadsLike | Mapping[str, HeadsLike] | None,
        method: str | None,
        options: TokenSwiftOptions | None,
        streamer: BaseStreamer | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ):
        self.heads, self.method, self.options = heads, method, options
        self.streamer, self.tokenizer = streamer, tokenizer
        self.decoder: Decoder | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Generate; returns what `generate` does: ids [rows, n] with the prompts, or a ModelOutput where asked for.

        ``stop_strings`` is a parameter so that transformers hands it on: of its own it would ask for a tokenizer that
        it does not pass to a callable.

        Raises:
            ValueError: something cannot be honoured exactly; the message names it.
        """
        try:
            refuse_unsupported(model, generation_config, model_kwargs)
            prompts = unpadded(input_ids, model_kwargs)
            if stop_strings is not None:
                if self.tokenizer is None:
                    raise ValueError("stop_strings need a tokenizer: give it to decoder.custom_generate(tokenizer=...)")
                stopping_criteria = StoppingCriteriaList(
                    [*stopping_criteria, StopStringCriteria(self.tokenizer, stop_strings)]
                )
            if self.decoder is None or self.decoder.model is not model:
                self.decoder = Decoder(model, heads=self.heads)
            run = _Run(self.decoder, self, input_ids, logits_processor, stopping_criteria, generation_config)
            return run.one(prompts[0]) if len(prompts) == 1 else run.many(prompts)
        finally:
            if self.streamer is not None:
                # Also after an error: whoever reads an iterating streamer in another thread would wait forever.
                self.streamer.end()


def _continue_behind(prompt: list[int], streamer: BaseStreamer) -> None:
    """Let a streamer that skips the prompt decode new tokens behind its end, lest the first word lose its space."""
    if isinstance(streamer, TextStreamer) and streamer.skip_prompt:
        decode = partial(streamer.tokenizer.decode, **streamer.decode_kwargs)
        streamer.token_cache = end_of_text(prompt, decode)
        # What the prompt shows of an unfinished character is shown as the character that it becomes.
        streamer.print_len = len(decode(streamer.token_cache).rstrip(REPLACEMENT))


class _Run:
    """One call of `generate`."""

    def __init__(
        self,
        dec: Decoder,
        hook: CustomGenerate,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ):
        self.dec, self.hook, self.input_ids = dec, hook, input_ids
        self.processors, self.config = processors, config
        self.limit = config.max_length - input_ids.shape[1]
        self.eos = [int(i) for one in criteria if type(one) is EosTokenCriteria for i in one.eos_token_id]
        self.criteria = StoppingCriteriaList(one for one in criteria if type(one) not in _NATIVE_STOPS)
        limits = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
        self.limit = min([self.limit, *(limit - input_ids.shape[1] for limit in limits)])
        self.wants_dict = bool(config.return_dict_in_generate)
        self.wants_scores = self.wants_dict and bool(config.output_scores)
        self.wants_logits = self.wants_dict and bool(config.output_logits)
        self.fields, self.before = sampling_fields(processors, bool(config.do_sample))
        self.logits: dict[int, torch.Tensor] = {}
        """By position, the model's own logits [V] there, if they are asked for."""

    def sampling(self) -> SamplingParams:
        """The sampling parameters; a seed is drawn from torch's default generator where tokens are."""
        fields = {"penalty_window": self.dec.model.config.max_position_embeddings, **self.fields}
        if not self.config.do_sample:
            return SamplingParams(**fields, temperature=0)
        return SamplingParams(**fields, seed=int(torch.randint(2**63 - 1, ())))

    def _logits_hook(self, padded: bool):
        """The hook that runs processors without a sampling parameter, and keeps logits; None where neither is asked."""
        if self.before and padded:
            raise ValueError(f"{self._names(self.before)} cannot be honoured on a padded prompt: cut off the padding")
        before = as_hook(self.before, self.input_ids.device) if self.before else None
        if not (self.wants_scores or self.wants_logits):
            return before

        def hook(context: list[int], logits: torch.Tensor) -> torch.Tensor:
            self.logits[len(context)] = logits.clone()
            return logits if before is None else before(context, logits)

        return hook

    def one(self, prompt: list[int]) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Generate for a single prompt, token by token where stopping criteria or a streamer look at it."""
        device, streamer = self.input_ids.device, self.hook.streamer
        if streamer is not None:
            streamer.put(self.input_ids.cpu())
            _continue_behind(prompt, streamer)
        chunks = self.dec.stream(
            prompt,
            self.limit,
            self.hook.method,
            self.sampling(),
            self.hook.options,
            stop=self.eos,
            ignore_eos=True,
            logits_hook=self._logits_hook(len(prompt) < self.input_ids.shape[1]),
        )
        ids = self.input_ids
        scores: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        for token in (token for chunk in chunks for token in chunk.token_ids):
            if self.logits:
                own.append(self.logits.pop(len(prompt) + len(own))[None].to(device, torch.float32))
            if self.wants_scores:
                scores.append(self.processors(ids, own[-1]))
            ids = torch.cat([ids, torch.tensor([[token]], device=device)], dim=1)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if self.criteria and bool(self.criteria(ids, tuple(scores) if self.wants_scores else None).all()):
                break
        chunks.close()
        if not self.wants_dict:
            return ids
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=tuple(scores) if self.wants_scores else None,
            logits=tuple(own) if self.wants_logits else None,
        )

    def many(self, prompts: list[list[int]]) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Generate for several prompts in one batch; a row that ends early is filled with the padding token."""
        if self.hook.streamer is not None:
            raise ValueError("a streamer takes one prompt at a time")
        if self.before or self.criteria:
            raise ValueError(f"{self._names([*self.before, *self.criteria])} can be honoured for one prompt at a time")
        if self.wants_scores or self.wants_logits:
            raise ValueError("output_scores and output_logits are available for one prompt at a time")
        outs = self.dec.generate_batch(
            prompts,
            self.limit,
            self.hook.method,
            [self.sampling() for _ in prompts],
            self.hook.options,
            stop=[self.eos] * len(prompts),
            ignore_eos=True,
        )
        width = max(len(out.token_ids) for out in outs)
        padding = self.config.pad_token_id if self.config.pad_token_id is not None else (self.eos or [0])[0]
        rows = [out.token_ids + [padding] * (width - len(out.token_ids)) for out in outs]
        ids = torch.cat([self.input_ids, torch.tensor(rows, device=self.input_ids.device)], dim=1)
        return GenerateDecoderOnlyOutput(sequences=ids) if self.wants_dict else ids

    @staticmethod
    def _names(objects: Sequence[object]) -> str:
        return ", ".join(sorted({type(one).__name__ for one in objects}))
