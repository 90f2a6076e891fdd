"""Heads that draft a part of the vocabulary: the text stays, and a score is what the whole vocabulary's would be."""

import gc
import weakref

import pytest
import torch

from decoder import Decoder, DraftHeads, SamplingParams, TokenSwiftOptions
from decoder.draft_heads import KINDS
from decoder.drafters import METHODS
from decoder.drafters.draft_vocabulary import DraftVocabulary
from decoder.model.target import Target
from decoder.sampling.sampler import Sampler

from .conftest import VOCAB, random_heads, some, tiny_llama

DRAFTED = torch.arange(0, VOCAB, 2)
SAMPLERS = {
    "sampled, penalised": SamplingParams(seed=2, temperature=0.7, repetition_penalty=1.2, suppress_tokens=(4, 5)),
    "filtered": SamplingParams(seed=3, min_p=0.1, top_k=20),
    "greedy": SamplingParams(temperature=0),
}
WITH_HEADS = [name for name, method in METHODS.items() if "gated" in method.heads_kinds]


def restricted_heads(model, kind, drafted=DRAFTED):
    heads = random_heads(model, kind=kind)
    heads.set_draft_vocabulary(drafted)
    return heads


@pytest.fixture(scope="module", params=KINDS)
def drafting(request, model):
    return Decoder(model, heads=restricted_heads(model, request.param))


def test_all_heads_with_their_rows_cost_one_look_at_the_weights(model, monkeypatch):
    looks, refresh = [], Target.refresh_weights
    monkeypatch.setattr(Target, "refresh_weights", lambda target: (looks.append(target), refresh(target)))
    heads = {kind: restricted_heads(model, kind) for kind in ("chained", "gated")}
    dec = Decoder(model, heads=heads)
    rows = [dec.target.draft_vocabularies[one].rows for one in dec.heads.values()]
    assert len(looks) == 1 and {*dec.heads.values(), *rows} <= set(dec.target.helper_modules())
    looks.clear()
    Decoder(model)
    assert not looks
    with pytest.raises(ValueError, match="hidden"):
        Decoder(model, heads=DraftHeads(model.config.hidden_size + 8))
    dec.target.speed_up(random_heads(model))
    assert len(looks) == 1


@pytest.mark.parametrize("method", WITH_HEADS)
@pytest.mark.parametrize("name", some(SAMPLERS, ["sampled, penalised"]))
def test_the_text_is_that_of_ar(drafting, prompt, name, method):
    options, sampling = TokenSwiftOptions(tree=(2, 2, 1), ngrams=0, budget=64), SAMPLERS[name]
    expected = drafting.generate(prompt, 50, "ar", sampling)
    drafted = drafting.generate(prompt, 50, method, sampling, options)
    assert drafted.token_ids == expected.token_ids
    if method != "auto":
        assert drafted.stats.accepted > 0


@pytest.mark.parametrize("sampling", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("coupled", [True, False])
def test_scores_are_the_whole_vocabularys_of_these_tokens(dec, model, sampling, coupled):
    sampler = Sampler(
        SamplingParams(**{**vars(sampling), "top_k": 0, "min_p": 0.0}), VOCAB, torch.device("cpu"), list(range(20))
    )
    part, whole = DraftVocabulary(dec.target, DRAFTED), DraftVocabulary(dec.target, None)
    states = torch.randn(3, model.config.hidden_size, dtype=torch.float64)
    context = sampler.draft_context([7])
    few, all_of_them = part.logits(states), whole.logits(states)
    scores = part.scores(few, sampler, coupled, context, skip=1)
    torch.testing.assert_close(scores, whole.scores(all_of_them, sampler, coupled, context, skip=1)[:, DRAFTED])
    behind = torch.randint(VOCAB, (3, 2))
    torch.testing.assert_close(
        part.branch_scores(few, sampler, coupled, context, behind),
        whole.branch_scores(all_of_them, sampler, coupled, context, behind)[:, DRAFTED],
    )
    assert part.token_ids(scores.argmax(-1)).tolist() == DRAFTED[scores.argmax(-1)].tolist()


def test_heads_draft_these_tokens_alone(model, prompt):
    """A tree of heads whose tokens all lie outside of the text accepts nothing."""
    dec = Decoder(model)
    text = set(dec.generate(prompt, 60, "ar", SAMPLERS["greedy"]).token_ids)
    outside = torch.tensor(sorted(set(range(VOCAB)) - text))
    assert len(outside)
    dec = Decoder(model, heads=restricted_heads(model, "chained", outside))
    out = dec.generate(prompt, 60, "medusa", SAMPLERS["greedy"], TokenSwiftOptions(tree=(3, 3), ngrams=0))
    assert out.stats.accepted == 0 and out.stats.drafted > 0


def test_fewer_tokens_than_candidates(model, prompt):
    dec = Decoder(model, heads=restricted_heads(model, "gated", torch.tensor([3, 9])))
    expected = dec.generate(prompt, 60, "ar")
    for method in WITH_HEADS:
        options = TokenSwiftOptions(tree=(3, 3, 3), ngrams=0, budget=64)
        assert dec.generate(prompt, 60, method, options=options).token_ids == expected.token_ids


def test_changed_weights_are_drafted_with(prompt):
    model = tiny_llama()
    dec = Decoder(model, heads=restricted_heads(model, "chained"))
    vocabulary = DraftVocabulary.of(dec.target, dec.heads["chained"])
    state = torch.randn(1, model.config.hidden_size, dtype=torch.float64)
    before = vocabulary.logits(state)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert DraftVocabulary.of(dec.target, dec.heads["chained"]) is vocabulary
    torch.testing.assert_close(vocabulary.logits(state), 2 * before)


def test_a_decoder_that_is_gone_leaves_no_copy_of_rows_behind():
    model = tiny_llama()
    dec = Decoder(model, heads=restricted_heads(model, "chained"))
    vocabulary = weakref.ref(DraftVocabulary.of(dec.target, dec.heads["chained"]))
    del dec
    gc.collect()
    assert vocabulary() is None


def test_heads_of_another_model_are_refused(model):
    heads = random_heads(model)
    heads.set_draft_vocabulary(torch.tensor([1, VOCAB]))
    with pytest.raises(ValueError, match="they are another model's"):
        Decoder(model, heads=heads)
    assert isinstance(heads, DraftHeads)
