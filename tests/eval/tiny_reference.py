"""What the evaluator's tests decode with: a tiny random model whose tokens are bytes, and two short books."""

from pathlib import Path

import torch
from tests.tiny import SIZES, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

BOOKS = {
    "The Lighthouse": "The keeper climbed the stairs, trimmed the lamp, and looked upon the sea. " * 12,
    "The Mill": "Beside the river stood a mill whose wheel had not turned for many a year. " * 12,
}


def save_model(folder: Path, hidden_size: int = 32, positions: int = 512) -> None:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {**SIZES, "hidden_size": hidden_size, "intermediate_size": 64}
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=positions)
    LlamaForCausalLM(config).save_pretrained(folder)
