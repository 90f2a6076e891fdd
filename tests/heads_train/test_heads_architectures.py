"""The paper's models, by their config.json alone: sizes of the heads."""

import shutil

import pytest
import torch
from tiny_books import ARCHITECTURES

from heads_train import HeadsModule


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
