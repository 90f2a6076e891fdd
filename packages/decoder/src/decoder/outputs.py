"""What a generation gives: its request, its pieces as they come, and the whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import LogitsHook
from decoder.stats import Statistics


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


class BatchError(ValueError):
    """Some prompts of a batch failed; the others' results are kept.

    Attributes:
        outputs: an entry per prompt, None for those that failed.
        errors: what went wrong, by the prompt's index.
    """

    def __init__(self, outputs: Sequence[GenerationOutput | None], errors: dict[int, Exception]):
        index, error = next(iter(errors.items()))
        more = f" ({len(errors) - 1} other prompts failed too)" if len(errors) > 1 else ""
        super().__init__(f"prompt {index}: {error}{more}; the results of the others are in this error's `outputs`")
        self.outputs, self.errors = list(outputs), errors
