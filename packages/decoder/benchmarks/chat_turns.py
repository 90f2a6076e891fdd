"""Time to the first token in the turns of a chat, with and without prefix reuse; the texts must be equal.

OMP_NUM_THREADS=1 python packages/decoder/benchmarks/chat_turns.py --model data/smollm2 --heads data/heads-smollm2
"""

import argparse
import time

import transformers

import decoder

QUESTIONS = [
    "Why is the sky blue?",
    "And why is it red in the evening?",
    "What colour would it have on Mars?",
    "How far away is Mars?",
    "How long would it take to fly there?",
    "What would one eat on the way?",
    "Can plants grow in space?",
    "Which plants would you take along?",
    "What would you miss most?",
    "Write a short farewell to the Earth.",
]
SYSTEM = (
    "You are a patient teacher. You answer in a few plain sentences, you give an example where it helps, "
    "and you say so when you do not know something."
)


def chat(dec: decoder.Decoder, turns: int, max_new_tokens: int) -> list[tuple[str, float, int, int]]:
    """Of each turn: its text, the seconds to its first token, and how many tokens its prompt has and were reused."""
    messages, rows = [{"role": "system", "content": SYSTEM}], []
    for turn, question in enumerate(QUESTIONS[:turns]):
        messages.append({"role": "user", "content": question})
        sampling = decoder.SamplingParams(temperature=0.7, seed=turn)
        began = time.perf_counter()
        stream = dec.stream(messages, max_new_tokens, sampling=sampling)
        chunk = next(stream)
        first = time.perf_counter() - began
        for chunk in stream:  # noqa: B007
            pass
        out = chunk.output
        rows.append((out.text, first, len(out.request.prompt_ids), out.stats.reused_tokens))
        messages.append({"role": "assistant", "content": out.text})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--heads")
    parser.add_argument("--turns", type=int, default=len(QUESTIONS))
    parser.add_argument("--max-new-tokens", type=int, default=40)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    results = {}
    for size in (0, 2**30):
        dec = decoder.load(args.model, heads=args.heads, prefix_cache_bytes=size)
        dec.generate("Hello", 4)  # what is measured once per machine and process
        results[size] = chat(dec, args.turns, args.max_new_tokens)
    print(f"bitwise {dec.bitwise}; {dec.prefixes.nbytes / 2**20:.0f} MiB kept")
    print("turn  prompt tokens  prefilled with reuse  seconds to the first token: without, with reuse")
    for turn, (plain, reusing) in enumerate(zip(*results.values(), strict=True)):
        assert plain[0] == reusing[0], f"turn {turn + 1} differs"
        print(
            f"{turn + 1:4} {plain[2]:14} {reusing[2] - reusing[3]:21} {plain[1]:44.2f} {reusing[1]:11.2f}", flush=True
        )


if __name__ == "__main__":
    main()
