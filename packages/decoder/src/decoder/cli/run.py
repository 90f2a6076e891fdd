"""`decoder run`: stream a continuation of a prompt to the terminal, and keep it so that a cut run can go on."""

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers

from decoder.checks import decoded
from decoder.cli.continuation import stream_on
from decoder.cli.flags import check_flags, check_sources, constraint_of, from_flags, heads_of, load_from_flags
from decoder.cli.processes import tell
from decoder.cli.terminal import BROKE_OFF, INTERRUPTED, WRONG_INPUT, BrokeOff, StatusLine, program, rates, say
from decoder.cli.transcript import Transcript, digest_of, fingerprint
from decoder.collecting import uncollected
from decoder.decoder import Decoder
from decoder.drafters import METHODS
from decoder.loader import device_named
from decoder.model.loading import out_of_memory, read_config, read_tokenizer
from decoder.model.quantising import dtype_name
from decoder.model.yarn import hint_for_longer
from decoder.options import TokenSwiftOptions
from decoder.outputs import Chunk
from decoder.parallel.ranks import ALONE, ending_in_words, join, linked
from decoder.sampling.params import SamplingParams
from decoder.text.prompts import chat_ids, text_ids


def _check(args: argparse.Namespace) -> None:
    """Refuse what can be seen to be wrong from the flags alone."""
    check_flags(args)
    if args.resume and args.output is None:
        raise ValueError("--resume needs --output: the file that a cut run has left")
    if args.resume and args.verification != "exact":
        raise ValueError(
            f"--verification {args.verification} cannot be resumed exactly: "
            f"its draws do not follow from their positions"
        )
    if args.audit and args.verification != "exact":
        raise ValueError(f"--audit needs exact verification, not {args.verification}")
    if args.system is not None and args.chat is None:
        raise ValueError("--system goes with --chat")
    if args.sanitize_control_tokens and args.chat is None:
        raise ValueError("--sanitize-control-tokens goes with --chat")
    if args.method and METHODS[args.method].needs_heads and heads_of(args) is None:
        raise ValueError(f"--method {args.method} needs --heads")
    if args.method in ("draft-model", "triforce") and args.draft_model is None:
        raise ValueError(f"--method {args.method} needs --draft-model")
    if "" in args.stop:
        raise ValueError("--stop takes text that is not empty")
    if args.max_new_tokens is not None and args.max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens must be at least 0, not {args.max_new_tokens}")
    check_sources(args)


def _prompt_text(args: argparse.Namespace) -> str:
    text = _read(args.prompt_file) if args.prompt is None else args.prompt
    if not text:
        raise ValueError("the prompt is empty: give at least one token of text")
    return text


def _read(file: str | None) -> str:
    """The text of a file, or of standard input for "-" and where something is piped into it."""
    if file not in (None, "-"):
        if not Path(file).is_file():
            raise FileNotFoundError(f"there is no prompt file {file}")
        name, data = f"the prompt file {file}", Path(file).read_bytes()
    elif sys.stdin is None or (file is None and sys.stdin.isatty()):
        raise ValueError("give a prompt: --prompt-file F, --prompt TEXT, --chat TEXT, or pipe text into standard input")
    else:
        name, data = "standard input", sys.stdin.buffer.read()
    return decoded(data, name)


def _prompt_ids(args: argparse.Namespace) -> tuple[list[int], transformers.PreTrainedTokenizerBase]:
    """The prompt's token ids, and the tokenizer."""
    text = "" if args.chat is not None else _prompt_text(args)
    config, tokenizer = read_config(args.model, args.yarn), read_tokenizer(args.model)
    if args.chat is not None:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        ids = chat_ids([*system, {"role": "user", "content": args.chat}], tokenizer, args.sanitize_control_tokens)
    else:
        ids = text_ids(text, tokenizer)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and len(ids) + (args.max_new_tokens or 0) > limit:
        asked = f" and --max-new-tokens {args.max_new_tokens}" if args.max_new_tokens else ""
        raise ValueError(
            f"the prompt ({len(ids)} tokens){asked} goes beyond the {limit} positions of the model: shorten "
            + ("one of them" if asked else "it")
            + hint_for_longer(config)
        )
    return ids, tokenizer


class Run:
    """One run of the command; making it checks all input, as far as possible before the model is loaded.

    Of the processes that share a model the first one reads the prompt and writes the text.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.transcript: Transcript | None = None
        self.tokenizer: transformers.PreTrainedTokenizerBase | None = None  # where the prompt is read
        self.ranks = join(device_named(args.device)) if args.tensor_parallel else ALONE
        self.ranks.first(self._open)
        try:
            self._prepare()
        except BaseException:
            if self.transcript is not None:
                self.transcript.close()
            raise

    def _open(self) -> None:
        _check(self.args)
        if self.args.output is not None:
            self.transcript = Transcript(self.args.output, self.args.resume)

    def _prepare(self) -> None:
        args = self.args
        sampling, options = from_flags(SamplingParams, args), from_flags(TokenSwiftOptions, args)
        sampling = replace(sampling, constraint=self.ranks.first(lambda: constraint_of(args)))
        prompt_ids = self.ranks.first(self._read_prompt)
        request: dict[str, Any] = {
            "prompt": {"sha256": digest_of(prompt_ids), "tokens": len(prompt_ids)},
            "stop": args.stop,
            "ignore_eos": args.ignore_eos,
            "verification": options.verification,
            "kv_dtype": options.kv_dtype,
            # As they come back from a file: lists, and no tuples.
            **json.loads(json.dumps(asdict(sampling))),
        }
        self.ranks.first(lambda: self._check_request(request))
        self.decoder: Decoder = load_from_flags(args, args.tensor_parallel, self.tokenizer)
        model = self.decoder.model
        request |= {"dtype": dtype_name(model), "model": {"sha256": fingerprint(model)}}
        request["bitwise"] = self.decoder.bitwise
        if self.decoder.bitwise:
            # With another number of threads, or by other libraries, sums may have another order.
            request["threads"] = torch.get_num_threads()
            request["computed_by"] = self.decoder.target.backend.computed_by()
        self.ranks.first(lambda: self._check_request(request))
        kept = None if self.transcript is None else (self.transcript.token_ids, self.transcript.finish_reason)
        token_ids, finish_reason = self.ranks.agree(kept) or (list[int](), None)
        self.prompt_tokens, self.before, self.generated = len(prompt_ids), len(token_ids), len(token_ids)
        self.chunks: Generator[Chunk, None, None] = stream_on(
            self.decoder,
            prompt_ids,
            token_ids,
            args.max_new_tokens,
            args.method,
            sampling,
            options,
            args.stop,
            args.ignore_eos,
            finish_reason,
        )
        self.first = next(self.chunks)
        self.ranks.first(lambda: self._begin_transcript(request))

    def _read_prompt(self) -> list[int]:
        prompt_ids, self.tokenizer = _prompt_ids(self.args)
        return prompt_ids

    def _check_request(self, request: dict[str, Any]) -> None:
        if self.transcript is not None:
            self.transcript.check(request)

    def _begin_transcript(self, request: dict[str, Any]) -> None:
        if self.transcript is not None:
            self.transcript.open(request, self.first.text)

    def stream(self) -> None:
        """Generate: the text goes to standard output and the file, progress and statistics to standard error."""
        chunk = self.first
        complete = chunk.output is not None
        limit = "" if self.args.max_new_tokens is None else f" of {self.args.max_new_tokens:,}"
        with _own_line(), StatusLine(sys.stderr) as status:
            put(chunk.text)
            if not complete:
                status.show(f"reading {self.prompt_tokens + self.generated:,} tokens", now=True)
            for chunk in self.chunks:
                self.ranks.first(partial(self._emit, chunk))
                status.show(f"{self.generated:,}{limit} tokens{rates(chunk.stats)}")
        before = f" ({self.before} of them before)" if self.before and not complete else ""
        told = ", complete before" if complete else rates(chunk.stats)
        audit = f"; {self.decoder.audit(chunk.output)}" if self.args.audit and chunk.output else ""
        print(f"{self.generated} tokens{before}{told}{audit}", file=sys.stderr)

    def _emit(self, chunk: Chunk) -> None:
        if self.transcript is not None:
            ended = None if chunk.output is None else chunk.output.finish_reason
            self.transcript.append(chunk.token_ids, chunk.text, ended)
        self.generated += len(chunk.token_ids)
        put(chunk.text)

    def left_behind(self) -> str:
        """Where a run broke off and how it can go on, in words."""
        tokens = f"after {self.generated} tokens"
        if self.transcript is None:
            return tokens
        if self.args.verification != "exact":
            return f"{tokens}, whose text {self.args.output} keeps"
        return f"{tokens}; the same command with --resume goes on from there"

    def close(self) -> None:
        self.chunks.close()
        if self.transcript is not None:
            self.transcript.close()


def _of_torchrun(args: argparse.Namespace | None) -> AbstractContextManager[None]:
    """A block whose end by torchrun is told in words, where processes share the model."""
    return ending_in_words() if getattr(args, "tensor_parallel", False) else nullcontext()


@contextmanager
def _own_line() -> Iterator[None]:
    """On a terminal, end the text's line after this block, so that what follows begins on a line of its own."""
    try:
        yield
    finally:
        if sys.stdout.isatty():
            put("\n")


def put(text: str) -> None:
    """Write a piece of the text to standard output."""
    print(text, end="", flush=True)


def _tell(error: BaseException, where: str = "") -> None:
    sentence = _sentence(error)
    tell(sentence, f"{program()}: {sentence}{where}")


def _sentence(error: BaseException) -> str:
    allocation = re.search(r"you tried to allocate (\d+) bytes", str(error))
    if allocation:
        return f"out of memory: {int(allocation[1]):,} bytes could not be allocated"
    if out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _expected(error: Exception) -> bool:
    """Whether an error is due to the input or the machine, and not a fault of this program."""
    return isinstance(error, ValueError | OSError) or out_of_memory(error)


def in_words(work: Callable[[], None], args: argparse.Namespace | None = None) -> int:
    """Do the work of a command; errors that are due to the input or the machine become a sentence.

    Returns:
        the exit status.
    """
    # A character that the terminal cannot show must not end the output.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    # Errors are reported in one sentence, which warnings and retries of libraries would hide.
    huggingface_hub.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    try:
        with _of_torchrun(args):
            work()
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokeOff as error:
        _tell(error.__cause__ or error, f"; {error}")
        return BROKE_OFF
    except Exception as error:
        if not _expected(error):
            raise
        _tell(error)
        return WRONG_INPUT
    return 0


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    made: list[Run] = []

    def begin() -> None:
        with uncollected(), linked():
            made.append(Run(args))

    if status := in_words(begin, args):
        return status
    [one] = made
    with closing(one):
        try:
            with linked(), _of_torchrun(args):
                one.stream()
        except KeyboardInterrupt:
            say(f"interrupted {one.left_behind()}")
            return INTERRUPTED
        except BrokenPipeError:
            # The reader is gone, so what is still in the buffer must not fail again when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            say(f"standard output was closed {one.left_behind()}")
            return BROKE_OFF
        except Exception as error:
            if not _expected(error):
                raise
            _tell(error, f" {one.left_behind()}")
            return BROKE_OFF
    return 0
