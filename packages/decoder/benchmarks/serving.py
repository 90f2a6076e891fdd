"""Tokens per second of the server with 1, 4 and 8 clients at once, beside requests one after another.

OMP_NUM_THREADS=1 python packages/decoder/benchmarks/serving.py --model data/smollm2 --heads data/heads-smollm2
"""

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

QUESTIONS = [
    "Why is the sky blue?",
    "Name three rivers and say where they flow.",
    "How do I boil an egg?",
    "Write two sentences about the sea.",
    "What is a prime number?",
    "Tell me about the moon.",
    "How does a bicycle stay upright?",
    "What is bread made of?",
]


def ask(url: str, body: dict) -> tuple[str, int]:
    """The text of a chat and how many tokens it has."""
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        got = json.load(answer)
    return got["choices"][0]["message"]["content"], got["usage"]["completion_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--heads")
    parser.add_argument("--method", help="default: the server's own choice")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    command = [sys.executable, "-m", "decoder", "serve", "--model", args.model, "--port", "0"]
    command += ["--heads", args.heads] if args.heads else []
    command += ["--method", args.method] if args.method else []
    bodies = [
        dict(messages=[{"role": "user", "content": question}], max_tokens=args.max_tokens, seed=seed, temperature=0.7)
        for seed, question in enumerate(QUESTIONS)
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr if "http://" in line)
            url = re.search(r"http://\S+", line)[0]
            texts = {}
            # These teach the drafter what pays, and are not reported.
            for body in bodies[:2]:
                ask(url, body)
            for clients in (1, 4, 8):
                began = time.perf_counter()
                with ThreadPoolExecutor(clients) as pool:
                    answers = list(pool.map(lambda body: ask(url, body), bodies))
                seconds = time.perf_counter() - began
                for body, (text, _) in zip(bodies, answers, strict=True):
                    assert texts.setdefault(body["seed"], text) == text, "a text depends on who else was served"
                tokens = sum(count for _, count in answers)
                print(f"{clients} at once: {tokens / seconds:.1f} tokens/s ({tokens} tokens)", flush=True)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
