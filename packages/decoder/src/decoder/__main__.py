"""``python -m decoder``: stream a continuation of a prompt file to the terminal."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from decoder.decoder import load, methods
from decoder.options import TokenSwiftOptions
from decoder.sampling_params import SamplingParams


def _branching(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m decoder", description=__doc__)
    parser.add_argument("--model", required=True, help="model folder or hub id")
    parser.add_argument("--heads", help="heads checkpoint folder or hub id")
    parser.add_argument("--draft-model", help="small model's folder or hub id, for triforce")
    parser.add_argument("--prompt-file", required=True, type=Path, help="UTF-8 text")
    parser.add_argument("--max-new-tokens", required=True, type=int)
    parser.add_argument("--method", choices=methods(), help="default: tokenswift, or prompt-lookup without heads")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    parser.add_argument("--audit", action="store_true", help="score the text again afterwards and say what was found")
    sampling = parser.add_argument_group("sampling")
    for field in fields(SamplingParams):
        flag = "--" + field.name.replace("_", "-")
        sampling.add_argument(flag, type=type(field.default), default=field.default, help="default: %(default)s")
    drafting = parser.add_argument_group("drafting: changes the speed, never the text")
    drafting.add_argument("--tree", type=_branching, default=TokenSwiftOptions.tree, help="default: 1,3,3,3")
    drafting.add_argument("--ngrams", type=int, default=TokenSwiftOptions.ngrams, help="default: %(default)s")
    drafting.add_argument("--budget", type=int, help="slots of the partial cache; default: the prompt's length")
    return parser


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompt file {path}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt file {path} is not UTF-8 text") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 when done, 2 for wrong input, 130 when interrupted."""
    args = _parser().parse_args(arguments)
    try:
        sampling = SamplingParams(**{field.name: getattr(args, field.name) for field in fields(SamplingParams)})
        options = TokenSwiftOptions(tree=args.tree, ngrams=args.ngrams, budget=args.budget)
        prompt = _read(args.prompt_file)
        decoder = load(args.model, args.heads, draft_model=args.draft_model, device=args.device, dtype=args.dtype)
        output = None
        for chunk in decoder.stream(
            prompt, args.max_new_tokens, args.method, sampling, options, ignore_eos=args.ignore_eos
        ):
            print(chunk.text, end="", flush=True)
            output = chunk.output
        audit = f"; {decoder.audit(output)}" if args.audit else ""
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"python -m decoder: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    stats = output.stats
    rate = "" if stats.acceptance_rate is None else f", acceptance {stats.acceptance_rate:.2f}"
    speed = f"{stats.generated / stats.decode_seconds:.1f} tokens/s" if stats.decode_seconds else "nothing generated"
    per_step = "" if stats.tokens_per_step is None else f", {stats.tokens_per_step:.2f} tokens per step"
    print(f"\n{stats.generated} tokens, {speed}{per_step}{rate}{audit}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
