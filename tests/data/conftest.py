"""What tests of text that a model writes share."""

import gzip
import json

import pytest
import torch
import transformers
from tests.tiny import LETTERS, SIZES, byte_level
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if loop.first %}be kind|{% endif %}{{ m['role'] }}:{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def folders(tmp_path, request):
    """A tiny chat model (of the architecture that a test names, or Llama), prompts and books."""
    tokens = ["<end>", *LETTERS]
    tokenizer = byte_level(tokens)
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)
    fast.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    architecture = getattr(request, "param", "Llama")
    sizes = {**SIZES, "vocab_size": len(tokens), "max_position_embeddings": 256, "eos_token_id": 0}
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    model.generation_config.eos_token_id = list(range(40))  # so that many answers end
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "books").mkdir()
    for split in ("train", "validation"):
        row = {"messages": [{"role": "user", "content": f"why, {split}?"}]}
        (tmp_path / "prompts" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
        with gzip.open(tmp_path / "books" / f"{split}.jsonl.gz", "wt") as file:
            file.write(json.dumps({"text": "It was a dark night.\n\nThe old ship lay at rest. " * 60}) + "\n")
    return tmp_path
