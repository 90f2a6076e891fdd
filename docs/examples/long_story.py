"""Write a long story, on the screen and into a file, with the sampling that keeps long texts from repeating themselves.

    python docs/examples/long_story.py --model data/smollm2 --heads data/heads-smollm2 --output story.txt

A text of hours is better written by `python -m decoder --output story.txt`, which `--resume` goes on with after a cut.
"""

import argparse

import decoder

OPENING = "The lighthouse had been dark for eleven years when the lamp began to turn again. "


def write(dec: decoder.Decoder, opening: str, new_tokens: int, path: str) -> decoder.Chunk:
    """Stream the story into a file; returns the last chunk, whose statistics are those of the whole text."""
    sampling = decoder.SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2, penalty_window=1024, seed=7)
    with open(path, "w", encoding="utf-8") as file:
        file.write(opening)
        for chunk in dec.stream(opening, new_tokens, sampling=sampling, ignore_eos=True):
            file.write(chunk.text)
            print(chunk.text, end="", flush=True)
    return chunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder, hub id or GGUF file")
    parser.add_argument("--heads", help="draft heads for it")
    parser.add_argument("--opening", default=OPENING)
    parser.add_argument("--max-new-tokens", type=int, default=4000)
    parser.add_argument("--output", default="story.txt")
    args = parser.parse_args()
    dec = decoder.load(args.model, heads=args.heads)
    stats = write(dec, args.opening, args.max_new_tokens, args.output).stats
    rate = stats.generated / stats.decode_seconds
    print(f"\n\n{stats.generated} tokens, {rate:.1f} tokens/s, {stats.tokens_per_step:.2f} tokens per step")


if __name__ == "__main__":
    main()
