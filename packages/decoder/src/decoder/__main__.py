"""Stream a continuation of a prompt to the terminal.

`doctor` in place of flags tells what is fast here, and why not; `serve` serves the model over HTTP; `batch` answers a
file of requests.

Standard output gets the text and nothing else. Exit status: 0 done; 1 the run broke off, for instance on a full disk;
2 wrong usage or input; 130 interrupted.
"""

import argparse
import gc
import io
import json
import os
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import torch
import transformers

from decoder.checks import decoded
from decoder.cli.continuation import stream_on
from decoder.cli.doctor import doctor
from decoder.cli.flags import (
    add_constraint_flags,
    add_flags,
    add_loading_flags,
    add_sanitize_flag,
    check_flags,
    check_sources,
    constraint_of,
    from_flags,
    heads_of,
    load_from_flags,
)
from decoder.cli.processes import FLAG, first_speaks, tell
from decoder.cli.terminal import StatusLine
from decoder.cli.transcript import Transcript, digest_of, fingerprint
from decoder.decoder import Decoder, methods
from decoder.drafters import METHODS
from decoder.loader import device_named
from decoder.model.loading import out_of_memory, read_config, read_tokenizer
from decoder.model.short_weights import dtype_name
from decoder.options import TokenSwiftOptions
from decoder.outputs import Chunk
from decoder.parallel.ranks import ALONE, ending_in_words, join, linked
from decoder.sampling.params import SamplingParams
from decoder.stats import Statistics
from decoder.text.prompts import chat_ids, text_ids

BROKE_OFF, WRONG_INPUT, INTERRUPTED = 1, 2, 130
_LONGEST_MESSAGE = 300  # characters of what the parser says, which repeats what was typed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence instead of the whole usage."""
        _say(f"{message[:_LONGEST_MESSAGE]} (--help lists the flags)")
        sys.exit(WRONG_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m decoder", description=" ".join(__doc__.split("\n\n")[:2]), allow_abbrev=False)
    add_loading_flags(parser)
    parser.add_argument(FLAG, action="store_true", help="the processes that torchrun has started share the model")
    prompts = parser.add_argument_group("prompt", "one of these, or text piped into standard input")
    prompt = prompts.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-file", metavar="F", help="UTF-8 text; - is standard input")
    prompt.add_argument("--prompt", metavar="TEXT", help="the text itself")
    prompt.add_argument("--chat", metavar="TEXT", help="a message to a chat model")
    prompts.add_argument("--system", metavar="TEXT", help="the system message before it")
    add_sanitize_flag(prompts)
    length = parser.add_argument_group("length")
    length.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="default: until a stop or the model's last position"
    )
    length.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")
    length.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, metavar="FILE", help="write the text there too, as it comes, and FILE.tokens beside it"
    )
    output.add_argument("--resume", action="store_true", help="go on with what a cut run has left in --output, if any")
    output.add_argument("--audit", action="store_true", help="score the text again afterwards and say what was found")
    add_flags(parser.add_argument_group("sampling"), SamplingParams)
    shape = parser.add_argument_group("shape", "one of these says what the output must be")
    add_constraint_flags(shape.add_mutually_exclusive_group())
    drafting = parser.add_argument_group("drafting", "changes the speed, never the text (but see --verification)")
    drafting.add_argument("--method", choices=methods(), help="default: auto, which needs exact verification")
    add_flags(drafting, TokenSwiftOptions)
    return parser


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


def _prompt_ids(args: argparse.Namespace) -> list[int]:
    text = None if args.chat is not None else _prompt_text(args)
    config, tokenizer = read_config(args.model), read_tokenizer(args.model)
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
        )
    return ids


class _Run:
    """One run of the command; making it checks all input, as far as possible before the model is loaded.

    Of the processes that share a model the first one reads the prompt and writes the text.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.transcript: Transcript | None = None
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
        prompt_ids = self.ranks.first(lambda: _prompt_ids(args))
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
        self.decoder: Decoder = load_from_flags(args, args.tensor_parallel)
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
            _put(chunk.text)
            if not complete:
                status.show(f"reading {self.prompt_tokens + self.generated:,} tokens", now=True)
            for chunk in self.chunks:
                self.ranks.first(partial(self._emit, chunk))
                status.show(f"{self.generated:,}{limit} tokens{_rates(chunk.stats)}")
        before = f" ({self.before} of them before)" if self.before and not complete else ""
        rates = ", complete before" if complete else _rates(chunk.stats)
        audit = f"; {self.decoder.audit(chunk.output)}" if self.args.audit else ""
        print(f"{self.generated} tokens{before}{rates}{audit}", file=sys.stderr)

    def _emit(self, chunk: Chunk) -> None:
        if self.transcript is not None:
            ended = None if chunk.output is None else chunk.output.finish_reason
            self.transcript.append(chunk.token_ids, chunk.text, ended)
        self.generated += len(chunk.token_ids)
        _put(chunk.text)

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
    return ending_in_words() if args is not None and args.tensor_parallel else nullcontext()


@contextmanager
def _own_line() -> Iterator[None]:
    """On a terminal, end the text's line after this block, so that what follows begins on a line of its own."""
    try:
        yield
    finally:
        if sys.stdout.isatty():
            _put("\n")


def _rates(stats: Statistics) -> str:
    speed = f", {stats.generated / stats.decode_seconds:.1f} tokens/s" if stats.decode_seconds else ""
    per_step = "" if stats.tokens_per_step is None else f", {stats.tokens_per_step:.2f} tokens per step"
    rate = "" if stats.acceptance_rate is None else f", acceptance {stats.acceptance_rate:.2f}"
    return speed + per_step + rate


def _put(text: str) -> None:
    print(text, end="", flush=True)


def _say(sentence: str) -> None:
    print(f"python -m decoder: {sentence}", file=sys.stderr)


def _tell(error: BaseException, where: str = "") -> None:
    sentence = _sentence(error)
    tell(sentence, f"python -m decoder: {sentence}{where}")


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


def _doctor(arguments: Sequence[str]) -> None:
    print(doctor(arguments, _Parser))


def _serve(arguments: Sequence[str]) -> None:
    try:
        from decoder.serve.command import serve
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _SERVE_PACKAGES:
            raise
        raise ValueError(
            f"serving needs {package}, which is not installed: pip install 'tokenswift-decoder[serve]'"
        ) from None
    serve(arguments, _Parser)


def _batch(arguments: Sequence[str]) -> None:
    from decoder.jobs.command import batch

    batch(arguments, _Parser)


_COMMANDS = {"batch": _batch, "doctor": _doctor, "serve": _serve}
_SERVE_PACKAGES = ("uvicorn", "starlette", "prometheus_client")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        _say("standard output is closed: send it somewhere, to /dev/null for instance")
        return WRONG_INPUT
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    with first_speaks(arguments):
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    other = _COMMANDS.get(arguments[0]) if arguments else None
    args = None if other else _parser().parse_args(arguments)
    # A character that the terminal cannot show must not end the output.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    # Errors are reported in one sentence, which warnings and retries of libraries would hide.
    huggingface_hub.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    try:
        if other:
            other(arguments[1:])
            return 0
        with linked(), _of_torchrun(args):
            run = _Run(args)
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except Exception as error:
        if not _expected(error):
            raise
        _tell(error)
        return WRONG_INPUT
    with closing(run):
        try:
            with linked(), _of_torchrun(args):
                run.stream()
        except KeyboardInterrupt:
            _say(f"interrupted {run.left_behind()}")
            return INTERRUPTED
        except BrokenPipeError:
            # The reader is gone, so what is still in the buffer must not fail again when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _say(f"standard output was closed {run.left_behind()}")
            return BROKE_OFF
        except Exception as error:
            if not _expected(error):
                raise
            _tell(error, f" {run.left_behind()}")
            return BROKE_OFF
    return 0


if __name__ == "__main__":
    status = main()
    # Python would look for cycles among all that PyTorch and transformers have made, which takes a second or two.
    gc.freeze()
    sys.exit(status)
