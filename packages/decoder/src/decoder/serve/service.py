"""From a checked request to its pieces: tokens, limits, and the worker that decodes them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from decoder.arguments import Arguments, check_arguments, usable_methods
from decoder.constraints import Grammar, Vocabulary
from decoder.decoder import Decoder
from decoder.model.quantising import dtype_name
from decoder.new_sequence import vocabulary_of
from decoder.request import GenerationRequest
from decoder.serve.body import field_of, parse_body
from decoder.serve.errors import ApiError
from decoder.serve.reading import Reading, size_of, surely_too_long
from decoder.serve.requests import Asked, Parse
from decoder.serve.settings import Settings
from decoder.serve.speech import Speech, speech_of
from decoder.serve.tokenizing import read_detokenize, read_tokenize
from decoder.serve.worker import Job, Piece, Worker
from decoder.stats import Statistics
from decoder.text.prompts import prompt_ids

_FORCED_TRIED = 16  # forced tokens at a constraint's beginning that are tried before a request is taken


class TimeLimit:
    """When a request must have ended that may take ``seconds`` from now on."""

    def __init__(self, seconds: float):
        self.seconds, self._end = seconds, asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """A block that ends with ApiError 503 once the time is over."""
        try:
            async with asyncio.timeout_at(self._end):
                yield
        except TimeoutError:
            words = f"the request took longer than the {self.seconds:g} seconds that it may: ask for less"
            raise ApiError(503, words, code="timeout") from None


@dataclass(frozen=True)
class Prepared:
    """A request that may be decoded.

    Attributes:
        arguments: of each choice.
        speech: what its answers consist of.
        prompt_tokens: of all prompts together.
    """

    arguments: list[Arguments]
    speech: Speech
    prompt_tokens: int


class Running:
    """A submitted request: its pieces, as they come. `close` ends it, whether it is done or not.

    Args:
        limit: until when the request may take.
    """

    def __init__(self, worker: Worker, prepared: Prepared, limit: "TimeLimit"):
        self.prepared = prepared
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
        self._worker, self._pieces, self._open, self._limit = worker, pieces, len(prepared.arguments), limit

        def deliver(piece: Piece | ApiError) -> None:
            # A loop that is closed belongs to a server that is gone, and nobody waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        self._job = Job(prepared.arguments, deliver)
        worker.submit(self._job)

    def close(self) -> None:
        self._worker.cancel(self._job)

    async def piece(self) -> Piece | None:
        """The next piece, None after the last one; raises the ApiError that has ended the request."""
        if not self._open:
            return None
        async with self._limit.kept():
            piece = await self._pieces.get()
        if isinstance(piece, ApiError):
            raise piece
        self._open -= piece.output is not None
        return piece

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while (piece := await self.piece()) is not None:
            yield piece


class Counts:
    """Is told what happens to requests, and keeps nothing of it."""

    def watch(self, worker: Worker) -> None:
        """The thread that decodes."""

    def submitted(self, prompt_tokens: int) -> None:
        """A request has begun."""

    def finished(self, statistics: Statistics) -> None:
        """A text has ended; called in the worker's thread."""


class Service:
    """The decoder as the server's routes use it.

    Args:
        counts: what counts requests; None if nothing does.
        own_threads: whether others read requests and decode than who asks; else `Service.worker` has no thread, and
            nothing here waits.

    Attributes:
        tokenizer: for this side of the server; the worker's thread uses the decoder's own.
        fingerprint: of all that a seed's text depends on beside the request.
    """

    def __init__(self, dec: Decoder, settings: Settings, counts: Counts | None = None, own_threads: bool = True):
        self.dec, self.settings, self.counts = dec, settings, counts or Counts()
        assert dec.tokenizer is not None, "a server needs a tokenizer"
        self.tokenizer = deepcopy(dec.tokenizer)
        self.reading = Reading(self.tokenizer, dec.sanitize_control_tokens, own_threads)
        self.worker = Worker(dec, settings.max_batch, settings.max_queue, self.counts.finished, own_threads)
        self.counts.watch(self.worker)
        self.fingerprint = _fingerprint(dec)

    @property
    def max_body_bytes(self) -> int:
        """The largest body that a request may have.

        It is more than a prompt of all positions needs, in any script, and than a grammar that is much too long.
        """
        return max(2**24, 64 * self.dec.model.config.max_position_embeddings)

    def stop(self) -> None:
        """Take no more requests; those that run have the time of grace to end."""
        self.reading.stop()
        self.worker.stop(self.settings.grace)

    async def read(self, data: bytes, parse: Parse) -> Asked:
        """The checked request in a body; raises ApiError if it is none."""
        return await self.reading.read(len(data), lambda _: parse(parse_body(data)))

    async def tokenize(self, data: bytes) -> dict[str, Any]:
        """The body of an answer to `/tokenize`; raises ApiError 400."""

        def ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
            asked = read_tokenize(parse_body(data))
            try:
                found = asked.ids(tokenizer, self.dec.sanitize_control_tokens)
            except ValueError as error:
                raise ApiError(400, str(error)) from None
            pieces = tokenizer.convert_ids_to_tokens(found) if asked.with_pieces else None
            positions = self.dec.model.config.max_position_embeddings
            return {"count": len(found), "max_model_len": positions, "tokens": found, "token_strs": pieces}

        return await self.reading.read(len(data), ids)

    async def detokenize(self, data: bytes) -> dict[str, Any]:
        """The body of an answer to `/detokenize`; raises ApiError 400."""

        def text(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
            ids = read_detokenize(parse_body(data))
            self._check_ids("tokens", ids)
            found = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            return {"prompt": found, "content": found}

        return await self.reading.read(len(data), text)

    @property
    def properties(self) -> dict[str, Any]:
        """How the server is set up, by llama.cpp's names, and the methods of drafting that requests may name."""
        positions = self.dec.model.config.max_position_embeddings
        return {
            "default_generation_settings": {"n_ctx": positions, "params": {"n_predict": self.settings.max_tokens}},
            "total_slots": self.settings.max_batch,
            "model_path": self.settings.model,
            "chat_template": self.tokenizer.chat_template or "",
            "methods": usable_methods(self.dec, self.settings.options),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"tokenswift-decoder {version('tokenswift-decoder')}",
        }

    async def submit(self, asked: Asked, limit: TimeLimit) -> Running:
        """Submit a request, see `Running`. Raises ApiError if it is refused."""
        running = Running(self.worker, await self.prepare(asked), limit)
        self.counts.submitted(running.prepared.prompt_tokens)
        return running

    async def prepare(self, asked: Asked) -> Prepared:
        """Read and check a request. Raises ApiError if it is refused."""
        if asked.model not in (None, self.settings.model):
            words = f"there is no such model: this server has {self.settings.model}"
            raise ApiError(404, words, "model", "model_not_found")
        self._check_vocabulary(asked)
        if asked.truncate:
            prompts = [await self._last_turns(asked)]
        else:
            prompts = [await self._ids(asked, index) for index in range(len(asked.prompts))]
        size = size_of(asked.prompts[0])
        speech = await self.reading.read(size, lambda tokenizer: speech_of(asked, prompts[0], tokenizer))
        arguments = [one for ids in prompts for one in self._arguments(asked, speech, ids)]
        if speech.grammar is not None:
            await self._compile(speech.grammar, vocabulary_of(self.dec, arguments[0]), asked.shaped_by or "tools")
        return Prepared(arguments, speech, sum(map(len, prompts)))

    async def _compile(self, grammar: Grammar, vocabulary: Vocabulary, place: str) -> None:
        """Compile a grammar, so that what shows only then is a 400; it stays compiled for its texts."""

        def begin(_: PreTrainedTokenizerBase) -> None:
            if not grammar.start(vocabulary).mask().any():
                raise ValueError(f"no text holds to the {grammar.kind}")
            state = grammar.start(vocabulary)
            # That a grammar has no end may show only behind what it forces.
            for token in state.forced()[:_FORCED_TRIED]:
                if token not in vocabulary.end_ids:
                    state.advance(token)

        try:
            await self.reading.compile(begin)
        except ValueError as error:
            raise ApiError(400, f"{place}: {error}", field_of(place)) from None

    def _check_vocabulary(self, asked: Asked) -> None:
        self._check_ids("stop_token_ids", asked.stop_token_ids)
        self._check_ids("suppress_tokens", asked.sampling.suppress_tokens)
        self._check_ids("logit_bias", list(dict(asked.sampling.logit_bias or ())))

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        size = self.dec.target.vocab_size
        outside = next((token for token in ids if not 0 <= token < size), None)
        if outside is not None:
            raise ApiError(400, f"{name}: token id {outside} is outside the vocabulary of {size}", name)

    async def _ids(self, asked: Asked, index: int) -> list[int]:
        """The token ids of a request's prompt."""
        prompt, field = asked.prompts[index], asked.prompt_field
        positions = self.dec.model.config.max_position_embeddings
        for_template: dict[str, Any] = dict(asked.template_kwargs) if asked.chat else {}
        if asked.tools is not None:
            for_template["tools"] = asked.tools.offered

        def ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
            if surely_too_long(prompt, tokenizer, positions):
                words = f"the prompt has more tokens than the {positions:,} positions of the model: shorten it"
                raise ApiError(400, words, field, "context_length_exceeded")
            size, sanitized = self.dec.target.vocab_size, self.dec.sanitize_control_tokens
            return prompt_ids(prompt, tokenizer, size, sanitized, **for_template)

        try:
            return await self.reading.read(size_of(prompt), ids)
        except ValueError as error:
            place = f"{field}[{index}]: " if len(asked.prompts) > 1 else ""
            raise ApiError(400, f"{place}{error}", field) from None

    async def _last_turns(self, asked: Asked) -> list[int]:
        """The token ids of a chat without its oldest turns, as few as leave room for the answer."""
        messages = list(asked.prompts[0])
        head = next((at for at, one in enumerate(messages) if one["role"] not in ("system", "developer")), 0)
        starts = [head, *(at for at, one in enumerate(messages) if at > head and one["role"] == "user")]
        most = self.dec.model.config.max_position_embeddings - asked.least_tokens

        async def behind(start: int) -> list[int] | None:
            try:
                prompt = [*messages[:head], *messages[start:]]
                ids = await self._ids(replace(asked, prompts=[prompt]), 0)
            except ApiError as error:
                if error.code != "context_length_exceeded" or start == starts[-1]:
                    raise
                return None
            return ids if len(ids) <= most or start == starts[-1] else None

        if (ids := await behind(head)) is not None:
            return ids
        low, high, found = 0, len(starts) - 1, await behind(starts[-1])
        while high - low > 1:
            middle = (low + high) // 2
            if (ids := await behind(starts[middle])) is None:
                low = middle
            else:
                high, found = middle, ids
        assert found is not None, "the last turn is taken in any case"
        return found

    def _arguments(self, asked: Asked, speech: Speech, ids: list[int]) -> list[Arguments]:
        """The arguments of each choice for one prompt; raises ApiError 400 where they are of no use."""
        settings = self.settings
        positions = self.dec.model.config.max_position_embeddings
        if asked.max_tokens is not None and asked.max_tokens > settings.max_tokens:
            name = "max_tokens" if asked.response is None else "max_output_tokens"
            words = f"{name} may be at most {settings.max_tokens:,} here, not {asked.max_tokens:,}"
            raise ApiError(400, words, name)
        if len(ids) + asked.least_tokens > positions:
            words = f"the prompt has {len(ids):,} tokens and max_tokens is {asked.least_tokens:,}"
            words += f", but the model has {positions:,} positions: shorten one of them"
            raise ApiError(400, words, code="context_length_exceeded")
        likely = asked.likely_in_prompt
        try:
            request = GenerationRequest(
                ids,
                asked.max_tokens,
                asked.method or settings.method,
                asked.sampling,
                settings.options,
                [*asked.stop, *asked.stop_token_ids],
                ignore_eos=asked.ignore_eos,
                return_logprobs=asked.logprobs or asked.candidates > asked.n,
                # A vocabulary may be smaller than what may be asked for.
                top_logprobs=min(asked.top_logprobs, self.dec.target.vocab_size),
                prompt_logprobs=None if likely is None else min(likely, self.dec.target.vocab_size),
            )
            one = check_arguments(self.dec, request)
            one = replace(one, limit=min(one.limit, settings.max_tokens), shown=speech.shown)
            self.worker.admission.check(self.dec.cache_bytes(one))
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        sampling = replace(asked.sampling, constraint=speech.constraint)
        return [
            replace(one, sampling=replace(sampling, seed=sampling.seed + choice)) for choice in range(asked.candidates)
        ]


def _fingerprint(dec: Decoder) -> str:
    """A short hash of the model's configuration, what computes it, and with how many threads."""
    config, backend = dec.model.config, dec.target.backend
    of = [config.to_json_string(), dtype_name(dec.model), torch.get_num_threads(), dec.bitwise, backend.computed_by()]
    return "ts_" + hashlib.sha256(repr(of).encode()).hexdigest()[:12]
