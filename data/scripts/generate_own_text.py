"""Lets a chat model write its own training text for draft heads: answers to prompts, and continuations of books.

    python data/scripts/generate_own_text.py --model data/smollm2 --prompts data/prompts --books data/pg19 --output OUT

Writes OUT/train-NNN.npy and OUT/validation-NNN.npy, [rows, tokens] uint32, which `heads-train --data.source OUT` reads.
A row is filled to the end: where an answer is over the next prompt follows in the same conversation, so that nothing is
padded and every token stands in the context in which the model wrote it. All rows take a step together. A file that is
there is not written again: a cut run goes on with the file it was at.
"""

import argparse
import gzip
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import trange
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from heads_train.states import StateCache

# Sampling settings and their shares: as chats are sampled, as ts-eval samples by default, greedy.
WARM = dict(temperature=0.7, min_p=0.0, penalty=1.0)
VARIED = dict(temperature=1.0, min_p=0.1, penalty=1.2)
GREEDY = dict(temperature=0.0, min_p=0.0, penalty=1.0)
CHAT_SETTINGS = ((WARM, 0.6), (VARIED, 0.25), (GREEDY, 0.15))
# Greedy continuations of books soon repeat themselves.
BOOK_SETTINGS = ((WARM, 0.5), (VARIED, 0.5))
BOOK_SHARE = 0.35
PASSAGE_CHARACTERS = (150, 600)
# Stands for an answer where a template is asked what comes behind one.
ANSWER = "(the answer)"


@dataclass
class Row:
    """One text in the making: the settings it is sampled with and the prompts that it takes one after another."""

    prompts: Iterator[list[int]]
    temperature: float
    min_p: float
    penalty: float
    forced: list[int] = field(default_factory=list)


class RoomyLayer(DynamicLayer):
    """A layer's keys and values in room for the whole text, [rows, heads, capacity, head_dim]: no step copies them."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            rows, heads, _, size = keys.shape
            self.room = keys.new_empty(2, rows, heads, self.capacity, size)
        self.room[0, :, :, self.length : self.length + 1] = keys
        self.room[1, :, :, self.length : self.length + 1] = values
        self.length += 1
        self.keys, self.values = self.room[:, :, :, : self.length]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention of one token per row: the query heads of a key's group stand in the place of several tokens."""
    rows, heads, _, size = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], size)
    output = scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return output.reshape(rows, 1, heads, size), None


class Sampler:
    """Draws one token per row, each row with its own settings."""

    def __init__(self, rows: list[Row], vocabulary: int, generator: torch.Generator):
        self.temperature, self.min_p, self.penalty = (
            torch.tensor([getattr(row, name) for row in rows])[:, None] for name in ("temperature", "min_p", "penalty")
        )
        self.seen = torch.zeros(len(rows), vocabulary, dtype=torch.bool)
        self.generator = generator

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` [rows, vocabulary] -> token ids [rows]."""
        penalised = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        logits = torch.where(self.seen, penalised, logits)
        probs = (logits / self.temperature.clamp_min(1e-3)).softmax(-1)
        probs = probs.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), 0.0)
        drawn = torch.multinomial(probs, 1, generator=self.generator)
        return torch.where(self.temperature == 0, logits.argmax(-1, keepdim=True), drawn)[:, 0]


@torch.inference_mode()
def write_rows(
    model: PreTrainedModel, rows: list[Row], tokens: int, seed: int, layers: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [rows, tokens]; and the inputs of ``layers`` and of the final norm, [rows, tokens, (layers + 1) d]."""
    ends = set(np.atleast_1d(model.generation_config.eos_token_id).tolist())
    cache = DynamicCache()
    cache.layers = [RoomyLayer(tokens) for _ in range(model.config.num_hidden_layers)]
    sampler = Sampler(rows, model.config.vocab_size, torch.Generator().manual_seed(seed))
    ids = torch.empty(len(rows), tokens, dtype=torch.long)
    states = torch.empty(len(rows), tokens, (len(layers) + 1) * model.config.hidden_size)
    observed = [*(model.model.layers[layer] for layer in layers), model.model.norm]
    hooks = [module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, 0])) for module in observed]
    seen: list[torch.Tensor] = []
    drawn = [0] * len(rows)
    try:
        for position in trange(tokens, leave=False, mininterval=10):
            for number, row in enumerate(rows):
                if position == 0 or (not row.forced and ids[number, position - 1].item() in ends):
                    row.forced = next(row.prompts)
                ids[number, position] = row.forced.pop(0) if row.forced else drawn[number]
            column = ids[:, position, None]
            sampler.seen.scatter_(1, column, True)
            logits = model(
                column, past_key_values=cache, use_cache=True, cache_position=torch.tensor([position])
            ).logits
            torch.cat(seen, -1, out=states[:, position])
            seen.clear()
            drawn = sampler(logits[:, -1]).tolist()
    finally:
        for hook in hooks:
            hook.remove()
    return ids, states


def chat_prompts(tokenizer, questions: list[str], rng: random.Random) -> Iterator[list[int]]:
    """A conversation's user messages, each a question, as token ids up to where the assistant speaks."""

    def asked() -> dict[str, str]:
        return {"role": "user", "content": rng.choice(questions)}

    def rendered(*messages: dict[str, str]) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    text = rendered(asked())
    while True:
        yield tokenizer(text, add_special_tokens=False)["input_ids"]
        # What the template puts behind an answer, but for the token that has ended it.
        between = rendered(asked(), {"role": "assistant", "content": ANSWER}, asked()).partition(ANSWER)[2]
        text = between.removeprefix(tokenizer.eos_token)


def book_prompts(tokenizer, books: list[str], rng: random.Random) -> Iterator[list[int]]:
    """Passages of books, each from the start of a paragraph, the first ones often from a book's beginning."""
    while True:
        book = rng.choice(books)
        begin = 0 if rng.random() < 0.2 else book.find("\n\n", rng.randrange(max(1, len(book) - 2_000))) + 2
        passage = book[begin : begin + rng.randint(*PASSAGE_CHARACTERS)]
        # Up to the last whole word.
        yield tokenizer(passage.rpartition(" ")[0] or "The", add_special_tokens=False)["input_ids"]


def read_books(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def read_questions(path: Path) -> list[str]:
    return [json.loads(line)["messages"][0]["content"] for line in path.read_text(encoding="utf-8").splitlines()]


def make_rows(tokenizer, questions: list[str], books: list[str], count: int, rng: random.Random) -> list[Row]:
    rows = []
    for number in range(count):
        own = random.Random(rng.random())
        of_book = number < BOOK_SHARE * count
        prompts = book_prompts(tokenizer, books, own) if of_book else chat_prompts(tokenizer, questions, own)
        settings, shares = zip(*(BOOK_SETTINGS if of_book else CHAT_SETTINGS), strict=True)
        rows.append(Row(prompts, **rng.choices(settings, shares)[0]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="data/smollm2", help="folder of a chat model")
    parser.add_argument(
        "--prompts", type=Path, default=Path("data/prompts"), help="folder: train and validation .jsonl"
    )
    parser.add_argument("--books", type=Path, default=Path("data/pg19"), help="folder: train and validation .jsonl.gz")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=32, help="texts that are written together, one file of them")
    parser.add_argument("--tokens", type=int, default=512, help="length of each")
    parser.add_argument("--train-files", type=int, default=12)
    parser.add_argument("--validation-files", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--states", help="folder in which heads-train keeps last states (--model.state_cache)")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="*",
        default=(),
        help="layers whose inputs are kept with them, for an eagle3 drafter",
    )
    args = parser.parse_args()
    AttentionInterface.register("grouped-rows", grouped_attention)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="grouped-rows")
    kept = StateCache(args.states, args.model, torch.float32, args.layers) if args.states else None
    args.output.mkdir(parents=True, exist_ok=True)
    for split, files in (("validation", args.validation_files), ("train", args.train_files)):
        questions = read_questions(args.prompts / f"{split}.jsonl")
        books = read_books(args.books / f"{split}.jsonl.gz")
        for number in range(files):
            path = args.output / f"{split}-{number:03}.npy"
            if path.exists():
                continue
            seed = args.seed * 1_000_003 + number * 2 + (split == "train")
            rows = make_rows(tokenizer, questions, books, args.rows, random.Random(seed))
            ids, states = write_rows(model, rows, args.tokens, seed, args.layers)
            for n in range(len(rows) if kept else 0):
                kept.put(ids[n], states[n])
            part = path.with_name(f".writing-{path.name}")
            np.save(part, ids.numpy().astype(np.uint32))
            os.replace(part, path)
            print(f"{path}: {ids.numel()} tokens", flush=True)


if __name__ == "__main__":
    main()
