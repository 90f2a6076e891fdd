"""Rows written in step: the states are the model's, the drawn tokens have the shares that the settings ask for."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from decoder import SamplingParams

sys.path.append(str(Path(__file__).parents[2] / "data" / "scripts"))
import lockstep
from lockstep import ByteProduct, Lockstep, Script, Text, draw, draw_on_device, write_texts

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama(**sizes):
    return LlamaForCausalLM(LlamaConfig(**sizes))


def qwen2(**sizes):
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


@pytest.fixture(params=[llama, qwen2], ids=lambda make: make.__name__)
def model(request):
    torch.manual_seed(0)
    made = (
        LlamaForCausalLM(LlamaConfig(**SIZES)) if request.param == "llama" else Qwen2ForCausalLM(Qwen2Config(**SIZES))
    )
    for name, parameter in made.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return made.eval()


@torch.no_grad()
@pytest.mark.parametrize("short, tolerance", [(False, 1e-4), (True, 0.1)])
def test_states_and_logits_are_the_models(model, short, tolerance):
    ids = torch.randint(300, (5, 20))
    hook_saw = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: hook_saw.append(inputs[0]))
    logits = model(ids).logits
    own = Lockstep(model, 5, 20, short)
    states = torch.stack([own.step(ids[:, at]) for at in range(20)], dim=1)
    for found, wanted in ((states, hook_saw[0]), (own.logits(states[:, -1]), logits[:, -1])):
        assert (found - wanted).norm() < tolerance * wanted.norm()


@torch.no_grad()
def test_texts_hold_what_is_given_and_else_the_models_choice(model):
    prompts = [([5, 6, 7], SamplingParams(temperature=0)), ([8, 9], SamplingParams(temperature=0))]
    ends = range(0, 300, 7)
    texts = [Text(iter([prompts[row % 2], *prompts * 30]), ends) for row in range(4)]
    ids, states = write_texts(Lockstep(model, 4, 60, short=False), texts, 60, 1, lambda count: None)
    assert ids.shape == (4, 60) and states.shape == (4, 60, 64)
    best = model(ids).logits.argmax(-1)
    for row in range(4):
        given, turn = [prompts[row % 2], *prompts * 30], 0
        left = list(given[0][0])
        for at, token in enumerate(ids[row].tolist()):
            if left:
                assert token == left.pop(0)
                continue
            assert token == best[row, at - 1]
            if token in ends:
                turn += 1
                left = list(given[turn][0])


def drawn_at_once(logits, settings, texts, rng):
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        seen[row, text] = True
    script = Script([iter([([0], sampling)]) for sampling in settings], 1, logits.device)
    return draw_on_device(logits, script.settings[:, 0], seen, rng).tolist()


@pytest.mark.parametrize("draw", [draw, drawn_at_once])
def test_shares_of_drawn_tokens(draw):
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    rng, count = torch.Generator().manual_seed(0), 20_000
    logits = probabilities.log().expand(count, -1)
    cases = (
        (SamplingParams(temperature=1.0), probabilities),
        (SamplingParams(temperature=0.5), probabilities**2),
        (SamplingParams(temperature=1.0, min_p=0.2), torch.tensor([0.5, 0.3, 0.15, 0, 0])),
        (SamplingParams(temperature=0), torch.tensor([1.0, 0, 0, 0, 0])),
    )
    for sampling, wanted in cases:
        drawn = torch.tensor(draw(logits.clone(), [sampling] * count, [[]] * count, rng))
        found = torch.bincount(drawn, minlength=5) / count
        assert (found - wanted / wanted.sum()).abs().max() < 0.015, sampling


@pytest.mark.parametrize("draw", [draw, drawn_at_once])
def test_a_penalty_is_for_tokens_of_the_text(draw):
    logits = torch.tensor([[2.0, 1.9, -0.5], [-1.0, -1.1, -4.0]])
    settings = [SamplingParams(temperature=0, repetition_penalty=1.2)] * 2
    assert draw(logits.clone(), settings, [[0, 0], [0]], torch.Generator()) == [1, 1]
    assert draw(logits.clone(), settings, [[2], [1]], torch.Generator()) == [0, 0]


def test_a_model_of_another_type_is_refused(model):
    model.config.model_type = "gemma3_text"
    with pytest.raises(ValueError, match="llama and qwen2 alone, and this one is gemma3_text"):
        Lockstep(model, 1, 8)


@pytest.mark.parametrize("largest", [None, 63])
def test_byte_products_of_inputs_of_any_size(largest, monkeypatch):
    if largest:  # as on a processor without VNNI
        monkeypatch.setattr(lockstep, "largest_code", lambda: largest)
    weight, x = torch.randn(24, 40), torch.randn(3, 40) * torch.tensor([[1e-3], [1.0], [1e3]])
    found, wanted = ByteProduct(weight)(x), x @ weight.T
    assert ((found - wanted).norm(dim=-1) < 0.02 * wanted.norm(dim=-1)).all()
    assert not ByteProduct(weight)(torch.zeros(1, 40)).any()
