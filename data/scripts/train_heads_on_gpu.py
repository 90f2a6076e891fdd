"""Makes gated draft heads for a chat model in minutes of one GPU: the model writes text, and heads learn from it.

    python data/scripts/train_heads_on_gpu.py --model M --prompts data/prompts --books data/pg19 --output runs/heads

The text is made as by generate_own_text.py, and touches no disk: rows are written in step (lockstep.py), drawn on the
device without waiting for it, and the states of these passes stay in its memory, where the heads read them. They learn
the model's own distributions, by cross entropy in the first half of the steps and then by their overlap; new ones start
from a least-squares fit. Held-out rows, of prompts that no training row has, are measured over the whole vocabulary, as
heads-train does. A CPU can do it, slowly. The output is what `heads-train fit` leaves in DIR/last: --heads goes on from
there (give another --seed for other text), and ship_heads.py stores it in bfloat16.
"""

import argparse
import math
import random
import time

import numpy as np
import torch
from torch import Tensor

from decoder import DraftHeads
from decoder.parts import available_memory
from generate_own_text import (
    Row,
    add_flags,
    check_flags,
    ends_of_turns,
    file_of,
    read_chat_tokenizer,
    read_sources,
)
from heads_train.callbacks import versions
from heads_train.model_card import write_model_card
from heads_train.module import HeadsModule
from heads_train.precision import chosen_precision
from lockstep import Lockstep, Script, write_script

NEW_HEADS = {"num_heads": 3, "kind": "gated", "shared": True}
FITTED_TOKENS = 2**19
LOSS_CHUNK_TOKENS = 8_192
# Of the sum of the heads' losses.
MOST_GRADIENT = 3.0
WARMUP_STEPS = 50
STEPS_BETWEEN_LINES = 100


class StatesInMemory:
    """States of whole rows by their token ids, as `heads_train.states.StateCache` keeps them on the disk."""

    def __init__(self) -> None:
        self.rows: dict[bytes, Tensor] = {}

    @staticmethod
    def _key(token_ids: Tensor) -> bytes:
        return token_ids.cpu().numpy().astype(np.uint32).tobytes()

    def get(self, token_ids: Tensor) -> Tensor | None:
        return self.rows.get(self._key(token_ids))

    def put(self, token_ids: Tensor, states: Tensor) -> None:
        self.rows[self._key(token_ids)] = states


def write_text(args: argparse.Namespace, module: HeadsModule, began: float) -> dict[str, np.ndarray]:
    """The ids [rows, tokens] of each split; their states are kept where the heads look for them.

    It ends when half of ``args.minutes`` after ``began`` is over, so that the heads have the other half to learn in.
    """
    read, tokenizer = read_sources(args), read_chat_tokenizer(args)
    stops, kept = ends_of_turns(module.backbone, tokenizer), StatesInMemory()

    def write(rows: list[Row], rng: random.Random) -> np.ndarray:
        model = Lockstep(module.backbone, len(rows), args.tokens, short=False)
        script = Script([row.prompts for row in rows], args.tokens, module.states.device)
        ids, states = write_script(model, script, stops, rng.randrange(2**31))
        for row, state in zip(ids.cpu(), states, strict=True):
            kept.put(row, state)
        return ids.cpu().numpy().astype(np.uint32)

    text = {}
    for split, count in (("validation", args.held_out), ("train", args.rows)):
        parts = []
        for begin in range(0, count, args.together):
            if begin and args.minutes is not None and time.monotonic() - began > 30 * args.minutes:
                print(f"half of the time is over: {begin} rows are enough", flush=True)
                break
            part = argparse.Namespace(**vars(args) | {"rows": min(args.together, count - begin)})
            parts.append(file_of(part, tokenizer, read[split], split, len(parts), write))
            print(f"{split} text: {sum(each.size for each in parts)} tokens", flush=True)
        text[split] = np.concatenate(parts)
    module.states.kept = kept
    return text


def check_memory(args: argparse.Namespace, module: HeadsModule) -> None:
    """Raise ValueError where the rows would not fit beside the model, which is there already."""
    config, width, vocabulary = module.config, module.states.dtype.itemsize, module.states.vocabulary
    together, step = min(args.together, max(args.rows, args.held_out)), min(LOSS_CHUNK_TOKENS, args.batch * args.tokens)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * size
    weights = sum(one.numel() for one in module.backbone.parameters())  # of which `Lockstep` makes its own copies
    # Logits are there in float32, some five times in drawing and in a loss.
    writing = width * (together * args.tokens * token + weights) + 24 * together * vocabulary
    training = 24 * step * (module.heads.draft_vocab_size or min(args.draft_vocab_size, vocabulary))
    states = width * (args.rows + args.held_out) * args.tokens * config.hidden_size
    needed, free = states + max(writing, training), available_memory(module.states.device)
    if needed > free:
        raise ValueError(
            f"{args.rows} rows, {together} of them together, need about {needed / 2**30:.1f} GiB beside the model, and "
            f"{free / 2**30:.1f} are available: lower --rows or --together"
        )


@torch.no_grad()
def validate(module: HeadsModule, rows: np.ndarray) -> dict[str, float]:
    """Figures of the heads on held-out ``rows`` [n, tokens], by heads-train's names."""
    for row in rows:
        module.validation_step(_ids(module, row[None]), 0)
    found = module.means("val")
    overlaps = " ".join(f"{found[f'val_overlap_head{i + 1}']:.3f}" for i in range(module.heads.num_heads))
    print(f"overlap of the heads with the model on {len(rows)} held-out rows: {overlaps}", flush=True)
    return found


def _ids(module: HeadsModule, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows.astype(np.int64)).to(module.states.device)


def train(module: HeadsModule, text: np.ndarray, args: argparse.Namespace, began: float) -> tuple[int, int]:
    """Let the heads learn from ``text`` [n, tokens], ``args.batch`` rows a step.

    They learn for ``args.steps``, or until ``args.minutes`` after ``began``. Returns the steps taken, and how many of
    them were of cross entropy.
    """
    optimizer, _ = module.optimizer(args.steps)
    order, start = np.random.default_rng(args.seed), time.monotonic()
    left: list[int] = []
    step = of_cross_entropy = 0
    # How much of the training is done, 0 to 1.
    while (done := _share(step, start, args, began)) < 1:
        # Rows left over at the end of a round are for another one.
        if len(left) < args.batch:
            left = order.permutation(len(text)).tolist()
        batch, left = left[: args.batch], left[args.batch :]
        module.distill_loss = "cross_entropy" if done < 0.5 else "overlap"
        of_cross_entropy += done < 0.5
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, step / WARMUP_STEPS) * (1 + math.cos(math.pi * done)) / 2
        losses, _, _ = module.losses(_ids(module, text[batch]), with_ranks=False)
        loss = sum(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.heads.parameters(), MOST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % STEPS_BETWEEN_LINES == 0:
            if not loss.isfinite():
                raise ValueError(f"the loss is {loss.item()} after {step} steps: lower --learning-rate")
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - start:.0f} s", flush=True)
    return step, of_cross_entropy


def _share(step: int, start: float, args: argparse.Namespace, began: float) -> float:
    if args.minutes is None:
        return step / args.steps
    # One step at least, however long the text took.
    left = 60 * args.minutes - (start - began)
    return 0.0 if step == 0 else 1.0 if left <= 0 else (time.monotonic() - start) / left


def load(args: argparse.Namespace, device: torch.device, dtype: str) -> HeadsModule:
    """The model on the device, with the heads that it begins with."""
    shape = NEW_HEADS | {"gate_width": args.gate_width}
    if args.heads is not None:
        given = DraftHeads.from_pretrained(args.heads)
        shape = {name: getattr(given, name) for name in shape}
    module = HeadsModule(
        args.model,
        args.heads,
        **shape,
        learning_rate=args.learning_rate,
        weight_decay=0.01,
        beta2=0.98,
        warmup_steps=WARMUP_STEPS,
        distill=True,
        distill_loss="overlap",
        loss_chunk_tokens=LOSS_CHUNK_TOKENS,
        backbone_dtype=dtype,
    )
    module.configure_model()
    return module.to(device)


def make_heads(args: argparse.Namespace) -> None:
    """Write the text, then train the heads on it and save them."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = chosen_precision("cuda") if device.type == "cuda" else "32-true"
    mixed = precision == "bf16-mixed"
    torch.manual_seed(args.seed)
    began = time.monotonic()
    module = load(args, device, "bfloat16" if mixed else "float32")
    if args.heads is None and args.draft_vocab_size > (vocabulary := module.states.vocabulary):
        raise ValueError(f"the model has {vocabulary} tokens: give --draft-vocab-size {vocabulary} or less")
    check_memory(args, module)
    text = write_text(args, module, began)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # others may share the device, and caches of keys and values are many gigabytes
    if args.heads is None:
        module.draft_vocab_size = args.draft_vocab_size
        module.heads.set_draft_vocabulary(module.most_expected(text["train"], args.draft_vocab_size))
        module.fit(text["train"], FITTED_TOKENS)
    with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
        before = validate(module, text["validation"])
        steps, of_cross_entropy = train(module, text["train"], args, began)
    module.heads.check_finite()
    training = {
        "steps": steps,
        "steps_of_cross_entropy": of_cross_entropy,
        "source": "its own text, written in step on the device",
        "prompts": [str(folder) for folder in args.prompts],
        "book_share": args.book_share,
        "asking_share": args.asking_share,
        "seed": args.seed,
        "chunk_tokens": args.tokens,
        "chunks_per_step": args.batch,
        "train_chunks": len(text["train"]),
        "start": args.heads,
        "fitted_tokens": 0 if args.heads else min(FITTED_TOKENS, text["train"].size),
        "learning_rate": args.learning_rate,
        "weight_decay": module.weight_decay,
        "warmup_steps": module.warmup_steps,
        "distill": True,
        "distill_loss": "overlap",
        "draft_vocab_size": module.draft_vocab_size,
        "precision": precision,
        "untrained": before,
        "versions": versions(),
    }
    # Whatever comes afterwards, what was learnt is kept.
    module.heads.save_pretrained(args.output, base_model=args.model, training=training)
    with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
        training |= {"validation": validate(module, text["validation"]), "validated_at_step": steps}
    module.heads.save_pretrained(args.output, base_model=args.model, training=training)
    write_model_card(args.output, module.heads, args.model, training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_flags(parser)
    parser.add_argument("--rows", type=int, default=4096, help="texts to learn from")
    parser.add_argument("--together", type=int, default=1024, help="texts that are written in step")
    parser.add_argument("--held-out", type=int, default=32, help="further texts, to measure on")
    parser.add_argument("--heads", help="folder of conditioned or gated heads to go on from; without it new ones")
    parser.add_argument("--gate-width", type=int, help="numbers in the gated unit of new heads; twice the hidden size")
    parser.add_argument("--draft-vocab-size", type=int, default=16_384, help="tokens that new heads draft")
    parser.add_argument("--steps", type=int, default=2_400)
    parser.add_argument(
        "--minutes", type=float, help="end after so long, at most half of it for the text, and not after --steps"
    )
    parser.add_argument("--batch", type=int, default=16, help="texts of a step")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of AdamW at its peak")
    parser.add_argument("--device", help="cuda where there is a GPU, else cpu")
    args = parser.parse_args()
    check_flags(parser, args)
    if args.minutes is not None and not args.minutes > 0:
        parser.error("--minutes must be above 0")
    if min(args.held_out, args.steps, args.batch) < 1 or args.batch > args.rows:
        parser.error("--held-out, --steps and --batch must be at least 1, and --batch at most --rows")
    try:
        make_heads(args)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
