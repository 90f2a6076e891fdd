"""Lets a chat model write its own training text for draft heads: chats, and continuations of books.

    python data/scripts/generate_own_text.py --model data/smollm2 --prompts data/prompts --books data/pg19 --output OUT

Writes OUT/train-NNN.npy and OUT/validation-NNN.npy, [rows, tokens] uint32, which `heads-train --data.source OUT` reads.
A row is filled to the end: where an answer is over the next prompt follows in the same conversation, so that nothing is
padded and every token stands in the context in which the model wrote it. Some of the prompts are the model's own, too:
behind a chat template that ends where the user speaks it writes a question (Magpie, arXiv 2406.08464), and there is no
end of different ones. The decoder writes many rows together. A file that is there is not written again: a cut run goes
on with the file it was at.
"""

import argparse
import dataclasses
import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from tqdm import tqdm

import decoder
from decoder import Decoder, SamplingParams
from decoder.parts import Cluster, read_config, read_tokenizer
from heads_train.backbone import load_backbone
from heads_train.states import StateCache
from lockstep import Lockstep, Text, write_texts

# Sampling settings and their shares: as chats are sampled, as ts-eval samples by default, greedy.
WARM = SamplingParams(temperature=0.7)
VARIED = SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.2)
GREEDY = SamplingParams(temperature=0.0)
CHAT_SETTINGS = ((WARM, 0.6), (VARIED, 0.3), (GREEDY, 0.1))
# Greedy continuations of books soon repeat themselves.
BOOK_SETTINGS = ((WARM, 0.5), (VARIED, 0.5))
BOOK_SHARE = 0.35
# How the model's own questions are sampled, and their share of the chats.
ASKING = SamplingParams(temperature=1.0, min_p=0.02)
ASKING_SHARE = 0.6
PASSAGE_CHARACTERS = (150, 600)
Written = TypeVar("Written")
# Of each folder of prompts, lists of questions and books.
Sources = list[tuple[list[list[str]], list[str]]]
# Stand for an answer and a question where a template is asked what comes around them.
ANSWER = "(the answer)"
QUESTION = "(the question)"


@dataclass
class Row:
    """One text in the making: the prompts that it takes one after another, and its token ids.

    With each prompt comes how the text behind it is sampled.
    """

    prompts: Iterator[tuple[list[int], SamplingParams]]
    ids: list[int]


def write_rows(dec: Decoder, rows: list[Row], tokens: int, together: int) -> np.ndarray:
    """Fill all rows to ``tokens`` token ids, at most ``together`` of them at once: [rows, tokens] uint32."""
    with tqdm(total=len(rows) * tokens, unit=" tokens", leave=False, mininterval=10) as bar:
        while True:
            samplings = []
            for row in rows:
                if len(row.ids) < tokens:
                    prompt, sampling = next(row.prompts)
                    row.ids = (row.ids + prompt)[:tokens]
                    if len(row.ids) < tokens:
                        samplings.append(sampling)
            bar.update(sum(len(row.ids) for row in rows) - bar.n)
            short = [row for row in rows if len(row.ids) < tokens]
            if not short:
                return np.array([row.ids for row in rows], np.uint32)
            prompts, missing = [row.ids for row in short], [tokens - len(row.ids) for row in short]
            for index, chunk in dec.stream_batch(prompts, missing, "ar", samplings, max_batch=together):
                bar.update(len(chunk.token_ids))
                short[index].ids = short[index].ids + chunk.token_ids


def chat_prompts(
    tokenizer, questions: list[list[str]] | None, sampling: SamplingParams, rng: random.Random
) -> Iterator[tuple[list[int], SamplingParams]]:
    """A conversation's user messages, questions of any list alike, as token ids up to where the assistant speaks.

    Without lists the model writes the messages, too: then the ids up to where the user speaks come before each.
    """

    def asked() -> dict[str, str]:
        return {"role": "user", "content": rng.choice(rng.choice(questions)) if questions else QUESTION}

    def rendered(*messages: dict[str, str]) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    asking = dataclasses.replace(ASKING, seed=rng.randrange(2**31))
    text = rendered(asked())
    while True:
        before, question, behind = text.partition(QUESTION)
        if question:
            yield tokenizer(before, add_special_tokens=False)["input_ids"], asking
            text = _behind_turn(tokenizer, behind)
        yield tokenizer(text, add_special_tokens=False)["input_ids"], sampling
        # What the template puts behind an answer, but for the token that has ended it.
        between = rendered(asked(), {"role": "assistant", "content": ANSWER}, asked()).partition(ANSWER)[2]
        text = _behind_turn(tokenizer, between)


def _behind_turn(tokenizer, text: str) -> str:
    """What a template puts behind a turn, but for the token that ends the turn, which the model has written."""
    if not text.startswith(tokenizer.eos_token):
        raise ValueError(f"the chat template ends a turn with {text[:20]!r} and not with {tokenizer.eos_token!r}")
    return text.removeprefix(tokenizer.eos_token)


def book_prompts(
    tokenizer, books: list[str], sampling: SamplingParams, rng: random.Random
) -> Iterator[tuple[list[int], SamplingParams]]:
    """Passages of books, each from the start of a paragraph, the first ones often from a book's beginning."""
    while True:
        book = rng.choice(books)
        found = -1 if rng.random() < 0.2 else book.find("\n\n", rng.randrange(max(1, len(book) - 2_000)))
        begin = 0 if found < 0 else found + 2
        passage = book[begin : begin + rng.randint(*PASSAGE_CHARACTERS)]
        # Up to the last whole word.
        yield tokenizer(passage.rpartition(" ")[0] or "The", add_special_tokens=False)["input_ids"], sampling


def read_books(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def read_questions(folder: Path, split: str) -> list[list[str]]:
    """The questions of a split; beside those to train with the patterns', each asked about each of its subjects."""
    lines = (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    lists = [[json.loads(line)["messages"][0]["content"] for line in lines]]
    patterns = folder / "patterns.json"
    if split == "train" and patterns.exists():
        read = json.loads(patterns.read_text(encoding="utf-8"))
        lists.append([ask.format(about) for one in read for ask in one["ask"] for about in one["about"]])
    return lists


def make_rows(
    tokenizer, questions: list[list[str]], books: list[str], args: argparse.Namespace, count: int, rng: random.Random
) -> list[Row]:
    rows = []
    for number in range(count):
        own = random.Random(rng.random())
        of_book = number < args.book_share * count
        settings, shares = zip(*(BOOK_SETTINGS if of_book else CHAT_SETTINGS), strict=True)
        sampling = dataclasses.replace(rng.choices(settings, shares)[0], seed=rng.randrange(2**31))
        if of_book:
            prompts = book_prompts(tokenizer, books, sampling, own)
        else:
            asks_itself = rng.random() < args.asking_share
            prompts = chat_prompts(tokenizer, None if asks_itself else questions, sampling, own)
        rows.append(Row(prompts, []))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser)
    parser.add_argument("--rows", type=int, default=128, help="texts of a file")
    parser.add_argument("--together", type=int, default=32, help="texts that are decoded in one pass")
    parser.add_argument(
        "--states",
        type=Path,
        help="write all texts of a file in step, faster and not with the model's exact probabilities (lockstep.py), "
        "and keep the model's states for --model.state_cache DIR of heads-train, which then need not read the text",
    )
    parser.add_argument("--train-files", type=int, default=12)
    parser.add_argument("--validation-files", type=int, default=1)
    parser.add_argument("--ray", metavar="ADDRESS", help="of a cluster that writes the files; auto starts Ray here")
    parser.add_argument("--ray-actors", type=int, default=1, help="processes of it, each with weights of its own")
    parser.add_argument("--ray-cpus", type=int, default=1, help="processors, and threads, of each")
    parser.add_argument("--ray-gpus", type=float, default=0, help="GPUs of each")
    args = parser.parse_args()
    if args.ray and args.states:
        parser.error("--states is for one process: leave it or --ray out")
    check_flags(parser, args)
    try:
        write_files(args)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What tells which text is written, and where it goes."""
    parser.add_argument("--model", default="data/smollm2", help="folder or GGUF file of a chat model")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        default=[Path("data/prompts")],
        help="folders: train and validation .jsonl; each has as many rows of a file as the others",
    )
    parser.add_argument("--books", type=Path, default=Path("data/pg19"), help="folder: train and validation .jsonl.gz")
    parser.add_argument("--book-share", type=float, default=BOOK_SHARE, help="share of the texts that continue books")
    parser.add_argument(
        "--asking-share", type=float, default=ASKING_SHARE, help="share of the chats whose questions are its own"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512, help="length of each text")
    parser.add_argument("--seed", type=int, default=0)


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if min(args.rows, args.together, args.tokens) < 1:
        parser.error("--rows, --together and --tokens must be at least 1")
    for name in ("book_share", "asking_share"):
        if not 0 <= getattr(args, name) <= 1:
            parser.error(f"--{name.replace('_', '-')} must be between 0 and 1")


def write_files(args: argparse.Namespace) -> None:
    """Write what is missing of the files that were asked for."""
    read, tokenizer = read_sources(args), read_chat_tokenizer(args)
    args.output.mkdir(parents=True, exist_ok=True)
    counts = {"validation": args.validation_files, "train": args.train_files}
    asked = [(split, number) for split, count in counts.items() for number in range(count)]
    missing = [one for one in asked if not _path(args, *one).exists()]
    if args.ray is None:
        write = in_step(args, tokenizer) if args.states else together(args)
        made = ((one, file_of(args, tokenizer, read[one[0]], *one, write)) for one in missing)
    else:
        cluster = Cluster(args.ray, args.ray_actors, args.ray_cpus, args.ray_gpus)
        made = ((one, ids) for one, ids, _ in cluster.map(partial(_ready, args, read), missing, 1))
    for one, ids in made:
        path = _path(args, *one)
        part = path.with_name(f".writing-{path.name}")
        np.save(part, ids)
        os.replace(part, path)
        print(f"{path}: {ids.size} tokens", flush=True)


def read_sources(args: argparse.Namespace) -> dict[str, Sources]:
    """What each split's texts begin with."""
    return {
        split: [
            (read_questions(folder, split), read_books(args.books / f"{split}.jsonl.gz")) for folder in args.prompts
        ]
        for split in ("validation", "train")
    }


def read_chat_tokenizer(args: argparse.Namespace):
    """The model's tokenizer. Raises ValueError for a model that writes no chats, or none of so many tokens."""
    tokenizer = read_tokenizer(args.model)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{args.model} is no chat model: its tokenizer has no chat template")
    if args.tokens > (positions := read_config(args.model).max_position_embeddings):
        raise ValueError(f"--tokens {args.tokens} is beyond the {positions} positions of {args.model}")
    return tokenizer


def ends_of_turns(backbone, tokenizer) -> list[int]:
    """The tokens behind which the next prompt comes."""
    return np.ravel(backbone.generation_config.eos_token_id or tokenizer.eos_token_id).tolist()


def _path(args: argparse.Namespace, split: str, number: int) -> Path:
    return args.output / f"{split}-{number:03}.npy"


def file_of(
    args: argparse.Namespace,
    tokenizer,
    read: Sources,
    split: str,
    number: int,
    write: Callable[[list[Row], random.Random], Written],
) -> Written:
    """What ``write`` makes of the rows of a file, from what has been ``read`` for its split."""
    rng = random.Random(args.seed * 1_000_003 + number * 2 + (split == "train"))
    rows: list[Row] = []
    for left, (questions, books) in zip(range(len(read), 0, -1), read, strict=True):
        count = -(-(args.rows - len(rows)) // left)
        rows += make_rows(tokenizer, questions, books, args, count, rng)
    return write(rows, rng)


def _ready(args: argparse.Namespace, read: dict[str, Sources]):
    """What a process of a cluster needs to write files."""
    tokenizer, write = read_tokenizer(args.model), together(args)

    def do(files: list[tuple[str, int]]) -> list[np.ndarray]:
        return [file_of(args, tokenizer, read[split], split, number, write) for split, number in files]

    return do, {"model": args.model}


def together(args: argparse.Namespace) -> Callable[[list[Row], random.Random], np.ndarray]:
    """Writes rows with the decoder's own batches."""
    dec = decoder.load(args.model)
    return lambda rows, _: write_rows(dec, rows, args.tokens, args.together)


def in_step(args: argparse.Namespace, tokenizer) -> Callable[[list[Row], random.Random], np.ndarray]:
    """Writes rows in step and keeps their states where heads-train looks for them."""
    backbone = load_backbone(args.model, torch.bfloat16)
    model, kept = Lockstep(backbone, args.rows, args.tokens), StateCache(args.states, args.model, torch.bfloat16)
    ends = ends_of_turns(backbone, tokenizer)

    def write(rows: list[Row], rng: random.Random) -> np.ndarray:
        texts = [Text(row.prompts, ends) for row in rows]
        with tqdm(total=len(rows) * args.tokens, unit=" tokens", leave=False, mininterval=10) as bar:
            ids, states = write_texts(model, texts, args.tokens, rng.randrange(2**31), bar.update)
        for row, state in zip(ids, states, strict=True):
            kept.put(row, state)
        return ids.numpy().astype(np.uint32)

    return write


if __name__ == "__main__":
    main()
