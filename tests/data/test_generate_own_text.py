"""Text that a model writes for its heads: whole rows, prompts one after another, tokens that are the model's own."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from heads_train.backbone import FrozenStates, load_backbone
from heads_train.states import StateCache

SCRIPT = Path(__file__).parents[2] / "data" / "scripts" / "generate_own_text.py"
sys.path.append(str(SCRIPT.parent))
_spec = importlib.util.spec_from_file_location("generate_own_text", SCRIPT)
generating = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generating)


def run(folders, monkeypatch, *more):
    arguments = ["generate_own_text", "--rows", "6", "--tokens", "120", "--train-files", "2", "--together", "4", *more]
    for name in ("model", "prompts", "books"):
        arguments += [f"--{name}", str(folders / name)]
    monkeypatch.setattr("sys.argv", [*arguments, "--output", str(folders / "out")])
    monkeypatch.setattr(generating, "PASSAGE_CHARACTERS", (20, 60))
    generating.main()
    return sorted((folders / "out").iterdir())


def test_files_are_written_once_and_differ(folders, monkeypatch):
    files = run(folders, monkeypatch)
    assert [path.name for path in files] == ["train-000.npy", "train-001.npy", "validation-000.npy"]
    before = [path.stat().st_mtime_ns for path in files]
    assert [path.stat().st_mtime_ns for path in run(folders, monkeypatch)] == before
    first, second = (np.load(path) for path in files[:2])
    assert first.shape == second.shape == (6, 120) and first.dtype == np.uint32 and not np.array_equal(first, second)


def test_every_token_is_a_prompts_or_the_models_own(folders, monkeypatch):
    for name in ("CHAT_SETTINGS", "BOOK_SETTINGS"):
        monkeypatch.setattr(generating, name, ((generating.GREEDY, 1.0),))
    monkeypatch.setattr(generating, "ASKING", generating.GREEDY)
    asked: list[list] = []

    def recorded(prompts):
        def record(*arguments):
            asked.append(taken := [])
            for prompt, sampling in prompts(*arguments):
                taken.append(prompt)
                yield prompt, sampling

        return record

    for name in ("chat_prompts", "book_prompts"):
        monkeypatch.setattr(generating, name, recorded(getattr(generating, name)))
    rows = torch.from_numpy(np.load(run(folders, monkeypatch, "--train-files", "0")[0]).astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(folders / "model")
    ends = set(model.generation_config.eos_token_id)
    turns = 0
    for row, prompts in zip(rows, asked, strict=True):
        best, at = model(row[None]).logits[0].argmax(-1), 0
        for prompt in prompts:
            assert row[at : at + len(prompt)].tolist() == prompt[: len(row) - at]
            at = min(at + len(prompt), len(row))
            turns += at < len(row)
            while at < len(row):
                assert row[at] == best[at - 1]
                at += 1
                if row[at - 1].item() in ends:
                    break
        assert at == len(row)
    assert turns > len(rows)


def test_patterns_are_asked_about_all_of_their_subjects(folders):
    (folders / "prompts" / "patterns.json").write_text('[{"ask": ["What is {}?", "{}!"], "about": ["ice", "tea"]}]')
    asked = generating.read_questions(folders / "prompts", "train")
    assert asked == [["why, train?"], ["What is ice?", "What is tea?", "ice!", "tea!"]]
    assert generating.read_questions(folders / "prompts", "validation") == [["why, validation?"]]


@pytest.mark.parametrize(("folder", "least", "least_held_out"), [("prompts", 2_000, 40), ("prompts/code", 1_000, 20)])
def test_no_prompt_to_train_with_is_held_out(folder, least, least_held_out):
    prompts = SCRIPT.parents[1] / folder
    own, patterns = generating.read_questions(prompts, "train")
    (held_out,) = generating.read_questions(prompts, "validation")
    assert len(set(patterns)) == len(patterns) > least and len(held_out) >= least_held_out
    assert not {*own, *patterns} & set(held_out)


def test_no_text_continues_a_book_where_their_share_is_zero(folders, monkeypatch):
    for path in run(folders, monkeypatch, "--book-share", "0"):
        for row in np.load(path):
            assert PreTrainedTokenizerFast.from_pretrained(folders / "model").decode(row[:8]) == "be kind|"


def test_a_share_of_books_is_a_share(folders, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(folders, monkeypatch, "--book-share", "1.5")
    assert "--book-share must be between 0 and 1" in capsys.readouterr().err


def rendered(folders, questions, count):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders / "model")
    prompts = generating.chat_prompts(tokenizer, questions, generating.WARM, generating.random.Random(0))
    return [(tokenizer.decode(prompt), sampling) for prompt, sampling in (next(prompts) for _ in range(count))]


def test_the_next_prompt_follows_an_answer_in_the_same_conversation(folders):
    (first, how), (second, _), (third, _) = rendered(folders, [["why?"]], 3)
    assert first == "be kind|user:why?<end>\nassistant:" and how == generating.WARM
    assert second == third == "\nuser:why?<end>\nassistant:"


def test_the_model_writes_the_questions_where_none_are_given(folders):
    """It speaks as the user up to the token that ends its message, which is not there twice."""
    turns = rendered(folders, None, 4)
    assert [text for text, _ in turns] == ["be kind|user:", "\nassistant:", "\nuser:", "\nassistant:"]
    asking = [how.min_p for _, how in turns]
    assert asking == [generating.ASKING.min_p, 0.0, generating.ASKING.min_p, 0.0]


def test_rows_written_in_step_come_with_the_models_states(folders, monkeypatch):
    files = run(folders, monkeypatch, "--train-files", "1", "--states", str(folders / "states"), "--asking-share", "0")
    backbone = load_backbone(str(folders / "model"), torch.bfloat16)
    kept = StateCache(folders / "states", str(folders / "model"), torch.bfloat16)
    read = FrozenStates(backbone)
    for path in files:
        for row in torch.from_numpy(np.load(path).astype(np.int64)):
            states = kept.get(row)
            assert states.shape == (120, 32)
            torch.testing.assert_close(states, read(row[None])[0].float(), rtol=0.1, atol=0.1 * states.std().item())
