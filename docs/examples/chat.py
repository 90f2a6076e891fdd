"""Chat with a server in a terminal; any server of OpenAI's protocol will do.

    decoder serve --model data/smollm2 --heads data/heads-smollm2 --port 8000
    python docs/examples/chat.py --url http://127.0.0.1:8000/v1

The turns before are sent with each message. The server reads only what is new where it keeps prefixes.
"""

import argparse
import sys
from collections.abc import Iterable

from openai import OpenAI


def chat(client: OpenAI, lines: Iterable[str], max_tokens: int = 500) -> list[dict[str, str]]:
    """Answer each line, as it comes, on standard output; returns the messages of both sides."""
    model = client.models.list().data[0].id
    messages: list[dict[str, str]] = []
    for line in lines:
        messages.append({"role": "user", "content": line.strip()})
        answer = ""
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=max_tokens, temperature=0.7, stream=True
        )
        for chunk in stream:
            piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
            answer += piece
            print(piece, end="", flush=True)
        print("\n")
        messages.append({"role": "assistant", "content": answer})
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    print("Write a line; Ctrl-D ends.", file=sys.stderr)
    chat(OpenAI(base_url=args.url, api_key=args.api_key), sys.stdin)


if __name__ == "__main__":
    main()
