"""Continues a generation that was interrupted, with the same tokens and text as if it had not been."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace

from decoder.decoder import Decoder
from decoder.new_sequence import text_stream
from decoder.options import TokenSwiftOptions
from decoder.outputs import Chunk, GenerationOutput, Request
from decoder.sampling.params import SamplingParams
from decoder.stats import Statistics


def stream_on(
    decoder: Decoder,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    max_new_tokens: int | None,
    method: str | None = None,
    sampling: SamplingParams | None = None,
    options: TokenSwiftOptions | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    finish_reason: str | None = None,
    return_logprobs: bool = False,
) -> Generator[Chunk, None, None]:
    """`Decoder.stream` for a text whose first tokens, ``token_ids``, have been generated before.

    Since the noise is keyed by position and the penalty window covers prompt and output, these tokens can simply be
    added to the prompt, where `SamplingParams.continued_tokens` tells them from it. Text and stop strings are decoded
    over the whole output. The first chunk comes before any work and has no new tokens, but the text so far. The output
    in the last chunk is the whole generation; its statistics are those of the new tokens alone.

    Args:
        decoder: the decoder.
        prompt_ids: the token ids of the original prompt.
        token_ids: the tokens that were generated before.
        max_new_tokens: the length of the whole generation; None goes on until a stop or the model's last position.
        method, sampling, options, ignore_eos, return_logprobs: as in `Decoder.stream`; log-probabilities are in the
            chunks alone, those of the new tokens.
        stop: stop strings.
        finish_reason: why the text ended with ``token_ids``, if it did. After "length" a longer text can be asked for.

    Raises:
        ValueError: as in `Decoder.stream`; there are more than ``max_new_tokens`` tokens already; or the verification
            is independent, whose draws do not follow from their positions.
    """
    sampling, options = sampling or SamplingParams(), options or TokenSwiftOptions()
    if token_ids and options.verification != "exact":
        raise ValueError(
            f"a text of {options.verification} verification cannot be continued exactly: "
            f"its draws do not follow from their positions"
        )
    if max_new_tokens is not None and len(token_ids) > max_new_tokens:
        raise ValueError(f"there are {len(token_ids)} tokens already, more than the {max_new_tokens} asked for")
    # The default budget depends on the prompt's length, which must not include the generated tokens.
    if options.budget is None:
        options = replace(options, budget=options.budget_for(len(prompt_ids)))
    rest = None if max_new_tokens is None else max_new_tokens - len(token_ids)
    context = [*prompt_ids, *token_ids]
    on = replace(
        sampling,
        continued_tokens=sampling.continued_tokens + len(token_ids),
    )
    stream = decoder.stream(context, rest, method, on, options, ignore_eos=ignore_eos, return_logprobs=return_logprobs)
    request = Request(decoder.model, list(prompt_ids), sampling, options.verification, None, options.kv_dtype)
    ended = finish_reason if finish_reason == "stop" or rest == 0 else None
    return _run(stream, decoder, request, token_ids, stop, ended)


def _run(
    stream: Generator[Chunk, None, None],
    decoder: Decoder,
    request: Request,
    token_ids: Sequence[int],
    stop: Sequence[str],
    finish_reason: str | None,
) -> Generator[Chunk, None, None]:
    text = text_stream(decoder.tokenizer, stop, request.prompt_ids, request.sampling)
    token_ids = list(token_ids)
    for token in token_ids:
        text.push(token)

    def chunk(tokens: list[int], stats: Statistics, logprobs: list[float] | None = None) -> Chunk:
        piece = text.take(final=finish_reason is not None)
        output = GenerationOutput(list(token_ids), text.text, finish_reason, stats, request) if finish_reason else None
        return Chunk(tokens, piece, stats, output, None if logprobs is None else logprobs[: len(tokens)])

    with closing(stream):
        yield chunk([], Statistics())
        if finish_reason:
            return
        for step in stream:
            tokens = []
            for token in step.token_ids:
                tokens.append(token)
                text.push(token)
                if text.stopped:
                    break
            token_ids += tokens
            if text.stopped:
                finish_reason = "stop"
            elif step.output is not None:
                finish_reason = step.output.finish_reason
            yield chunk(tokens, step.stats, step.logprobs)
            if finish_reason:
                return
