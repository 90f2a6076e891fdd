"""The paper's models, by their config.json alone: sizes of the heads, and small random models of the same kind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from heads_train import HeadsModule

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


def make_random_model(name: str, folder: Path) -> Path:
    """A small random model of the architecture ``name`` (Llama-3.1's for other names) that reads single bytes."""
    path = ARCHITECTURES / f"{name}.json"
    config = json.loads((path if path.exists() else ARCHITECTURES / "llama31.json").read_text())
    vocabulary = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    config |= {key: value for key, value in SMALL.items() if key in config}
    config |= dict(num_key_value_heads=1 if groups > 1 else 4, vocab_size=len(vocabulary))
    config |= dict(bos_token_id=0, eos_token_id=0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    # Byte-level BPE without merges: the kind of tokenizer that these architectures' own classes expect.
    tokenizer = Tokenizer(models.BPE({entry: i for i, entry in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama31", 50.3),
        ("llama2-yarn", 50.3),
        ("qwen25-1.5b", 7.1),
        ("qwen25-7b", 38.5),
        ("qwen25-14b", 78.6),
        ("r1-qwen-32b", 78.6),
        ("qwq-32b", 78.6),
    ],
)
def test_trainable_parameters_are_those_of_the_paper(name, millions, tmp_path):
    """The paper counts the linear layers; each head also has two norms."""
    shutil.copy(ARCHITECTURES / f"{name}.json", tmp_path / "config.json")
    with torch.device("meta"):
        module = HeadsModule(str(tmp_path))
    hidden = module.config.hidden_size
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert all(parameter.is_meta for parameter in trainable)
    assert round(sum(p.numel() for p in trainable if p.ndim == 2) / 1e6, 1) == millions
    assert sum(p.numel() for p in trainable if p.ndim == 1) == 3 * 2 * hidden
    assert module.heads.norm_eps == module.config.rms_norm_eps
