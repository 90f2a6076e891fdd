"""Makes the sequence that checked arguments ask for: its sampler, its drafter and its cache."""

import weakref
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from decoder.arguments import Arguments
from decoder.cache.form import CacheForm
from decoder.cache.full import FullCache
from decoder.cache.stored import full_cache
from decoder.constraints.base import Vocabulary
from decoder.drafters import Drafter, DrafterContext, drafter_class
from decoder.engine import Engine
from decoder.outputs import Request
from decoder.prompt_scores import PromptScores
from decoder.sampling.acceptance import Independent, exact
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import Sampler
from decoder.sequence import Sequence, most_nodes
from decoder.text.stops import eos_ids
from decoder.text.stream import TextStream

if TYPE_CHECKING:
    from decoder.decoder import Decoder


def new_sequence(dec: "Decoder", engine: Engine, arguments: Arguments) -> Sequence:
    """A sequence of a decoder's model, to be decoded by ``engine``."""
    target, sampling, hook = dec.target, arguments.sampling, arguments.logits_hook
    target.ranks.refuse_unequal(arguments.by_name())
    # A preempted text has a longer prompt the next time, and the same draft cache.
    options = replace(arguments.options, budget=arguments.options.budget_for(len(arguments.context)))
    exactly = options.verification == "exact"
    # The engine refers to the sequence: caches are to go with the last reference to it, and not wait for the collector
    # of cycles.
    engine = weakref.proxy(engine)

    def begun(context: list[int], remaining: int) -> tuple[Drafter, FullCache]:
        """The drafter and the empty cache of a text of which ``context`` is known."""
        drafter = drafter_class(arguments.method, options, remaining)(
            DrafterContext(
                target,
                arguments.heads,
                dec.draft_target,
                sampling,
                options,
                context,
                dec.verify_costs,
                remaining,
                dec.tuning_state(arguments),
                running=lambda: max(1, engine.decoding),
            )
        )
        smallest, growable = len(context) + target.width(most_nodes(drafter, sampler)), arguments.open_ended
        cache = full_cache(CacheForm.of(options), smallest + remaining * (not growable), growable=growable)
        if target.has_two_forms:
            cache.prompt_tokens = len(arguments.context) - sampling.continued_tokens
        return drafter, cache

    vocabulary, scored = vocabulary_of(dec, arguments), arguments.prompt_logprobs
    sampler = Sampler(
        sampling,
        target.vocab_size,
        target.device,
        arguments.context,
        hook,
        collect_logprobs=arguments.return_logprobs,
        collect_top_logprobs=arguments.top_logprobs,
        choice=target.backend.choice,
        vocabulary=vocabulary,
    )
    return Sequence(
        Request(dec.model, arguments.context, sampling, options.verification, hook, options.kv_dtype, vocabulary),
        sampler,
        *begun(arguments.context, arguments.limit),
        arguments.limit,
        arguments.stop_ids,
        _text_stream(dec, arguments),
        exact if exactly else Independent(sampling.seed, target.device),
        # Reading from a GPU takes long, so all is read at once; but a hook needs each logits vector on the host.
        draws_whole_trees=exactly and sampler.draws_whole_trees and target.draws_whole_trees,
        # Other verifications choose the text by the drafts, which a new drafter would not make again.
        renew=begun if exactly else None,
        prompt_scores=None if scored is None else PromptScores(arguments.context, scored),
    )


def _text_stream(dec: "Decoder", arguments: Arguments) -> TextStream | None:
    if dec.tokenizer is None:
        return None
    shown = arguments.shown - arguments.stop_ids
    return text_stream(dec.tokenizer, arguments.stop_strings, arguments.context, arguments.sampling, shown)


def text_stream(
    tokenizer: PreTrainedTokenizerBase,
    stop: Collection[str],
    prompt_ids: list[int],
    sampling: SamplingParams,
    shown: Collection[int] = (),
) -> TextStream:
    """A stream of text whose stop strings count as ``sampling`` says."""
    least = max(0, sampling.min_tokens - sampling.continued_tokens)
    return TextStream(tokenizer, tuple(stop), prompt_ids, shown, sampling.include_stop_str_in_output, least)


def vocabulary_of(dec: "Decoder", arguments: Arguments) -> Vocabulary:
    """The tokens of a text, as its constraint sees them."""
    ends = frozenset(arguments.stop_ids)
    return Vocabulary(dec.target.vocab_size, dec.tokenizer, ends & eos_ids(dec.model, dec.tokenizer), ends)
