"""Tiny random models with their own tokenizers, a folder of little books, and a short run on them."""

import gzip
import json
import random
from pathlib import Path

import torch
from tests.tiny import LETTERS, SIZES, byte_level
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SONG = "the sea was calm and old ships lay at rest while men sang of home rain fell on every hill"
WORDS = SONG.split(" ")
HIDDEN = SIZES["hidden_size"]
EAGLE3 = ["--model.kind=eagle3", "--model.num_heads=2", "--model.distill=true", "--model.sliding_window=8"]
ARCHITECTURES = Path(__file__).parent / "architectures"
# Sizes that a test can run; everything else of an architecture stays.
SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_window_layers=2,
    torch_dtype="float32",
)


def make_model(folder: Path) -> Path:
    vocabulary = {word: i for i, word in enumerate(["<eos>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {**SIZES, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(**sizes, vocab_size=len(vocabulary), max_position_embeddings=256, rms_norm_eps=1e-5)
    model = LlamaForCausalLM(config)
    # The final norm's weight is one at birth; a copy of it must show.
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def make_random_model(name: str, folder: Path) -> Path:
    """A small random model of the architecture ``name`` (Llama-3.1's for other names) that reads single bytes."""
    path = ARCHITECTURES / f"{name}.json"
    config = json.loads((path if path.exists() else ARCHITECTURES / "llama31.json").read_text())
    vocabulary = ["<eos>", *LETTERS]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    config |= {key: value for key, value in SMALL.items() if key in config}
    config |= dict(num_key_value_heads=1 if groups > 1 else 4, vocab_size=len(vocabulary))
    config |= dict(bos_token_id=0, eos_token_id=0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    # Byte-level BPE without merges: the kind of tokenizer that these architectures' own classes expect.
    PreTrainedTokenizerFast(tokenizer_object=byte_level(vocabulary), eos_token="<eos>").save_pretrained(folder)
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


def short_run(model: Path, books: Path, folder: Path) -> list[str]:
    """Everything a short run on the tiny model needs but the subcommand; results land in ``folder/out``."""
    settings = {
        "model.model_name_or_path": model,
        "model.learning_rate": 1e-2,
        "model.warmup_steps": 2,
        "data.source": books,
        "data.chunk_tokens": 32,
        "data.chunks_per_book": 2,
        "data.batch_size": 4,
        "data.cache_dir": folder / "cache",
        "output": folder / "out",
        "trainer.accelerator": "cpu",
        "trainer.precision": "32-true",  # the same numbers on every processor
        "trainer.max_steps": 12,
        "trainer.log_every_n_steps": 1,
        "trainer.val_check_interval": 6,
        "trainer.check_val_every_n_epoch": "null",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
    }
    return [f"--{name}={value}" for name, value in settings.items()]
