"""Text that a model writes for its heads: whole rows, prompts one after another, states that are the model's own."""

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from heads_train.states import StateCache

SCRIPT = Path(__file__).parents[2] / "data" / "scripts" / "generate_own_text.py"
_spec = importlib.util.spec_from_file_location("generate_own_text", SCRIPT)
generating = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generating)

TEMPLATE = (
    "{% for m in messages %}{% if loop.first %}be kind|{% endif %}{{ m['role'] }}:{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def folders(tmp_path):
    tokens = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)
    fast.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "books").mkdir()
    for split in ("train", "validation"):
        row = {"messages": [{"role": "user", "content": f"why, {split}?"}]}
        (tmp_path / "prompts" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
        with gzip.open(tmp_path / "books" / f"{split}.jsonl.gz", "wt") as file:
            file.write(json.dumps({"text": "It was a dark night.\n\nThe old ship lay at rest. " * 60}) + "\n")
    return tmp_path


def test_rows_are_written_once_and_their_states_are_the_models(folders, monkeypatch, capsys):
    arguments = ["generate_own_text", "--rows", "6", "--tokens", "120", "--train-files", "2"]
    for name in ("model", "prompts", "books"):
        arguments += [f"--{name}", str(folders / name)]
    arguments += ["--output", str(folders / "out"), "--states", str(folders / "states")]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(generating, "PASSAGE_CHARACTERS", (20, 60))
    generating.main()
    files = sorted((folders / "out").iterdir())
    assert [path.name for path in files] == ["train-000.npy", "train-001.npy", "validation-000.npy"]
    before = [path.stat().st_mtime_ns for path in files]
    generating.main()
    assert [path.stat().st_mtime_ns for path in files] == before
    rows = np.load(files[0])
    assert rows.shape == (6, 120) and not np.array_equal(rows, np.load(files[1]))
    model = AutoModelForCausalLM.from_pretrained(folders / "model")
    kept = StateCache(folders / "states", str(folders / "model"), torch.float32)
    for row in torch.from_numpy(rows.astype(np.int64)):
        expected = model(row[None], output_hidden_states=True).hidden_states
        states = kept.get(row)
        # The last of transformers' hidden states is normalised already.
        torch.testing.assert_close(model.model.norm(states), expected[-1][0], rtol=1e-4, atol=1e-4)


def test_the_next_prompt_follows_an_answer_in_the_same_conversation(folders):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders / "model")
    prompts = generating.chat_prompts(tokenizer, ["why?"], generating.random.Random(0))
    first, second, third = (tokenizer.decode(next(prompts)) for _ in range(3))
    assert first == "be kind|user:why?<end>\nassistant:"
    assert second == third == "\nuser:why?<end>\nassistant:"
