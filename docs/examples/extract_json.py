"""Read facts out of a text as JSON that holds to a schema.

python docs/examples/extract_json.py --model data/smollm2 --text "Ada Lovelace was born in London in 1815."
"""

import argparse
import json

import decoder
from decoder import SamplingParams, constraints

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "born": {"type": "integer", "minimum": 0, "maximum": 2100},
        "place": {"type": "string", "maxLength": 60},
    },
    "required": ["name", "born", "place"],
    "additionalProperties": False,
}


def extract(dec: decoder.Decoder, text: str) -> dict:
    """The facts of a text; ValueError if the answer was cut before it was complete."""
    # A constraint says what may come, and the prompt what is wanted: the model does not see the schema.
    request = (
        f"Give the name, the year of birth (born) and the place of birth of the person in this text as JSON.\n\n{text}"
    )
    # One line, as json.dumps writes it: then names and punctuation are forced, and cost next to nothing.
    shape = constraints.json_schema(SCHEMA, any_whitespace=False)
    prompt = [{"role": "user", "content": request}] if dec.tokenizer.chat_template else f"{request}\n\n"
    out = dec.generate(prompt, 200, sampling=SamplingParams(temperature=0, constraint=shape))
    if out.finish_reason == "length":
        raise ValueError("the answer was cut before its end: allow more tokens")
    print(f"{len(out.token_ids)} tokens in {out.stats.steps} steps")
    return json.loads(out.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder, hub id or GGUF file of a chat model")
    parser.add_argument("--text", required=True)
    args = parser.parse_args()
    print(json.dumps(extract(decoder.load(args.model), args.text), indent=2))


if __name__ == "__main__":
    main()
