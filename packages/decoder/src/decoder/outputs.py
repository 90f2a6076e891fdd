"""The results of a generation: a chunk for each step, and the whole output."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from decoder.constraints.base import Vocabulary
from decoder.prompt_scores import PromptLogprob
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import LogitsHook
from decoder.stats import Statistics


@dataclass(frozen=True)
class Request:
    """The part of a generation's arguments that its text follows from.

    Attributes:
        model: the model that generated it.
        prompt_ids: the prompt's token ids.
        sampling: the sampling parameters.
        verification: `TokenSwiftOptions.verification`.
        logits_hook: the user's hook, if any.
        kv_dtype: `TokenSwiftOptions.kv_dtype`.
        vocabulary: the tokens, and which of them end the text.
    """

    model: PreTrainedModel = field(repr=False)
    prompt_ids: list[int]
    sampling: SamplingParams
    verification: str
    logits_hook: LogitsHook | None
    kv_dtype: str | None = None
    vocabulary: Vocabulary | None = field(default=None, repr=False)


@dataclass
class GenerationOutput:
    """A finished generation.

    Attributes:
        token_ids: the new tokens, a stop token included.
        text: what they add to the prompt's text, without special tokens and without a stop string; "" when there is no
            tokenizer.
        finish_reason: "length" or "stop".
        stats: counts and times.
        request: the arguments that the text follows from; `decoder.audit` needs them.
        logprobs: log-probability of each token under the filtered distribution, if asked for.
        top_logprobs: for each token the most likely tokens at its position as (token id, log-probability), under the
            same distribution and in decreasing order, if asked for. Of equally likely ones that with the smaller id
            comes first. There are fewer than were asked for where filters leave fewer.
        prompt_logprobs: what the model says of each token of the prompt, None for the first one, if asked for.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: Statistics
    request: Request
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[PromptLogprob | None] | None = None


@dataclass
class Chunk:
    """What one step adds to a stream.

    Attributes:
        token_ids: the step's tokens.
        text: the text that no later token can change any more, since the last chunk; it may be "".
        stats: counts and times so far; the same object in all chunks.
        output: the whole result; only in the last chunk, None in others.
        logprobs: the log-probability of each of the step's tokens, if asked for.
        top_logprobs: the most likely tokens at the position of each of them, if asked for; see `GenerationOutput`.
    """

    token_ids: list[int]
    text: str
    stats: Statistics
    output: GenerationOutput | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


class BatchError(ValueError):
    """Some texts of a batch failed; the results of the others are in this exception.

    Attributes:
        outputs: an entry per prompt, None for those that failed.
        errors: by the prompt's index, the exception that ended its text.
    """

    def __init__(self, outputs: Sequence[GenerationOutput | None], errors: dict[int, Exception]):
        index, error = next(iter(errors.items()))
        more = f" ({len(errors) - 1} other prompts failed too)" if len(errors) > 1 else ""
        super().__init__(f"prompt {index}: {error}{more}; the results of the others are in this error's `outputs`")
        self.outputs, self.errors = list(outputs), errors
