"""A tiny random Llama with its own tokenizer, and a folder of little books."""

import gzip
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SONG = "the sea was calm and old ships lay at rest while men sang of home rain fell on every hill"
WORDS = SONG.split(" ")
HIDDEN = 32


def make_model(folder: Path) -> Path:
    vocabulary = {word: i for i, word in enumerate(["<eos>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config)
    # The final norm's weight is one at birth; a copy of it must show.
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def make_books(folder: Path) -> Path:
    folder.mkdir()
    rng = random.Random(0)
    for split, lengths in (("train", [200] * 12 + [20]), ("validation", [100, 90, 10]), ("test", [80])):
        with gzip.open(folder / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            for length in lengths:
                begin = rng.randrange(len(WORDS))
                text = " ".join(WORDS[(begin + i) % len(WORDS)] for i in range(length))
                file.write(json.dumps({"short_book_title": "A Book", "text": text}) + "\n")
    return folder
