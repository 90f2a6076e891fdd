"""MAUVE against human text: compared with the package given the features, and refused where it would mislead."""

import json
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tiny_reference import BOOKS, byte_tokenizer
from transformers import AutoModelForCausalLM

import decoder
from ts_eval import metrics
from ts_eval.cli import main

PIECE = 4


@pytest.fixture(scope="module")
def package():
    return pytest.importorskip("mauve", reason="the extra mauve is not installed: pip install mauve-text")


@pytest.fixture(scope="module")
def model(data):
    return AutoModelForCausalLM.from_pretrained(data / "reference-model", dtype=torch.float32)


def tokens_of(text):
    return byte_tokenizer()(text)["input_ids"]


def random_features(count, shift=0.0, seed=0, size=6):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) + shift * torch.eye(size)[0]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["metrics", *map(str, arguments)])


def test_pieces_have_equal_lengths_and_the_rest_is_left_out():
    assert metrics.pieces_of([0, 1, 2, 3, 4, 5, 6], 3) == [[0, 1, 2], [3, 4, 5]]
    assert metrics.pieces_of([0, 1, 2, 3, 4, 5], 3) == [[0, 1, 2], [3, 4, 5]]
    assert metrics.pieces_of([0, 1], 3) == [] and metrics.pieces_of([], 3) == []
    assert len(metrics.pieces_of(range(200))[0]) == 64
    with pytest.raises(ValueError, match="piece_tokens must"):
        metrics.pieces_of([1], 0)


def test_features_are_the_mean_of_the_final_states_of_each_piece_alone(model):
    ids = tokens_of(BOOKS["The Mill"])[:38]
    model.train()
    try:
        found = metrics.PieceFeatures(model, 5, batch_size=3)(ids)
        assert model.training
    finally:
        model.eval()
    assert found.shape == (7, 32) and found.dtype == torch.float32
    for place, vector in enumerate(found):
        with torch.no_grad():
            states = model(torch.tensor([ids[5 * place : 5 * place + 5]]), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(vector, states[0].mean(0), rtol=1e-4, atol=1e-5)
    assert metrics.PieceFeatures(model, 5)(ids[:4]).shape == (0, 32)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_model_whose_weights_are_packed_has_features_too(data, dtype):
    """Its head's weight is bytes in another order, whose shape tells nothing."""
    dec = decoder.load(data / "reference-model", dtype=dtype)
    features = metrics.PieceFeatures(dec.model, PIECE)
    found = [features(ids) for ids in ([1, 2, 3, 4, 5, 6, 7, 8], [1])]
    assert [one.shape for one in found] == [(2, 32), (0, 32)] and torch.cat(found).isfinite().all()


@pytest.mark.parametrize("tokens", [0, 513])
def test_pieces_that_no_pass_can_take_are_refused(model, tokens):
    with pytest.raises(ValueError, match=f"between 1 and the model's 512 positions, not {tokens}"):
        metrics.PieceFeatures(model, tokens)


def test_mauve_is_the_packages_mean_over_seeds(package):
    human, generated = random_features(240), random_features(210, shift=1.5, seed=1)
    values = [
        package.compute_mauve(p_features=human.numpy(), q_features=generated.numpy(), seed=seed).mauve
        for seed in (25, 26, 27, 28, 29)
    ]
    assert len(set(values)) > 1
    assert metrics.mauve(human, generated) == pytest.approx(np.mean(values), abs=1e-12)


def test_the_same_texts_have_one_and_others_less_the_further_they_are(package):
    human = random_features(240)
    same, alike, other, apart = (
        metrics.mauve(human, generated)
        for generated in (human, *(random_features(240, shift, seed=1) for shift in (0, 2, 20)))
    )
    assert same == pytest.approx(1, abs=1e-4)
    # A histogram of ten pieces a cluster never has twice the same numbers.
    assert 0.9 < alike < same
    assert 0.05 < other < alike - 0.1
    assert 0 < apart < 0.01


def test_too_few_pieces_have_none(package):
    enough = random_features(metrics.FEWEST_PIECES)
    assert metrics.mauve(enough, enough) is not None
    assert metrics.mauve(enough, enough[1:]) is None
    assert metrics.mauve(enough[1:], enough) is None


def test_features_that_are_not_finite_are_refused(package):
    human, broken = random_features(200), random_features(200)
    broken[3, 2] = torch.inf
    for pair in ((human, broken), (broken, human)):
        with pytest.raises(ValueError, match="not finite"):
            metrics.mauve(*pair)


def test_the_class_collects_texts_of_both_kinds(package, model):
    features = metrics.PieceFeatures(model, PIECE)
    human, first, second = (tokens_of(text) for text in (*BOOKS.values(), "Nobody knew what had become of it. " * 4))
    metric = metrics.Mauve(features)
    metric.update(human, human=True)
    metric.update(second, human=False)
    assert metric.compute().isnan()
    metric.update(first, human=False)
    together = torch.cat((features(second), features(first)))
    assert metric.compute().item() == metrics.mauve(features(human), together) < 0.99


def test_the_class_neither_holds_nor_moves_the_model(model):
    metric = metrics.Mauve(metrics.PieceFeatures(model, PIECE))
    assert not list(metric.parameters()) and not list(metric.modules())[1:]


@pytest.fixture
def book(tmp_path):
    """Two texts of 900 bytes, and a short one."""
    texts = {"mill.txt": BOOKS["The Mill"], "light.txt": BOOKS["The Lighthouse"], "short.txt": BOOKS["The Mill"][:80]}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_command_compares_each_file_with_the_reference(package, data, model, book, capfd):
    mill, light, short = book / "mill.txt", book / "light.txt", book / "short.txt"
    arguments = [mill, light, short, "--model", data / "reference-model", "--reference", mill, "--piece-tokens", PIECE]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert "WARNING" not in capfd.readouterr().err
    rows = json.loads(result.stdout)
    features = metrics.PieceFeatures(model, PIECE)
    human, generated = (features(tokens_of(path.read_text())) for path in (mill, light))
    assert rows[str(mill)]["mauve"] == pytest.approx(1, abs=1e-4)
    assert rows[str(light)]["mauve"] == pytest.approx(metrics.mauve(human, generated), abs=1e-6)
    assert rows[str(light)]["mauve"] < 0.9
    assert rows[str(light)]["mauve_pieces"] == {"generated": len(generated), "human": len(human)}
    assert rows[str(light)]["mauve_reason"] is None
    assert rows[str(short)]["mauve"] is None and "short.txt has 20 of 4 tokens" in rows[str(short)]["mauve_reason"]
    shown = run(*arguments).stdout
    assert "MAUVE" in shown and "short.txt has 20 of 4 tokens." in shown


def test_command_takes_all_books_of_a_reference(package, data, model, book):
    books = data / "pg19/test.jsonl.gz"
    arguments = [book / "mill.txt", "--model", data / "reference-model", "--reference", books, "--piece-tokens", PIECE]
    # With another tokenizer for the other measures, too, pieces are of the model's tokens.
    for more in ([], ["--tokenizer", data / "reference-model"]):
        row = json.loads(run(*arguments, *more, "--json").stdout)[str(book / "mill.txt")]
        pieces = [len(text) // PIECE for text in BOOKS.values()]
        assert row["mauve_pieces"] == {"generated": pieces[1], "human": sum(pieces)}
        assert 0.1 < row["mauve"] < 0.99


def test_without_the_extra_one_sentence_says_what_to_install(data, book, monkeypatch):
    monkeypatch.setitem(sys.modules, "mauve", None)
    with pytest.raises(
        ValueError, match=r"needs mauve, which is not installed: pip install 'tokenswift-eval\[mauve\]'"
    ):
        metrics.mauve(random_features(300), random_features(300))
    arguments = [book / "mill.txt", "--model", data / "reference-model"]
    result = run(*arguments, "--reference", book / "mill.txt")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "pip install 'tokenswift-eval[mauve]'" in result.stderr
    # Nothing else needs it.
    assert run(*arguments).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--reference", "mill.txt"], "give --model"),
        (["--model", "MODEL", "--reference", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--model", "MODEL", "--reference", "chat.jsonl"], "chat.jsonl is a chat"),
        (["--model", "MODEL", "--reference", "mill.txt"], "mill.txt has 13 of 64 tokens"),
        (["--model", "MODEL", "--reference", "mill.txt", "--piece-tokens", "0"], "--piece-tokens must be between"),
    ],
)
def test_command_refuses_a_reference_that_cannot_be_one(data, book, monkeypatch, arguments, said):
    monkeypatch.chdir(book)
    # Refused before the package does anything, so a stand-in will do where it is not installed.
    monkeypatch.setitem(sys.modules, "mauve", object())
    (book / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}) + "\n")
    result = run("mill.txt", *(data / "reference-model" if word == "MODEL" else word for word in arguments))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert said in result.stderr
