"""The noise: known answers, uniformity, tail, and that it depends on nothing but seed, position and token."""

import math

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.model.target import Target
from decoder.sampling import noise
from decoder.sampling.noise import _GOLDEN, NoiseRows, gumbel, mix, random_bits

from .conftest import VOCAB, random_heads, tiny_llama
from .scipy_free import chi_square_tail

CPU = torch.device("cpu")


def test_known_answers_of_splitmix64():
    """First outputs for seed 1234567, as published with several implementations of SplitMix64."""
    counter = torch.full((5,), 1234567, dtype=torch.int64) + torch.arange(1, 6) * _GOLDEN
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [value % 2**64 for value in mix(counter).tolist()] == expected


def test_integers_equal_a_plain_python_computation():
    word = 2**64 - 1

    def mixed(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, position, token in ((0, 0, 0), (3, 17, 4095), (2**63 - 1, 131_071, 128_255)):
        key = mixed((mixed((seed + golden) & word) + (position + 1) * golden) & word)
        expected = mixed((key + (token + 1) * golden) & word)
        bits = random_bits(seed, torch.tensor([position]), torch.tensor([token]))
        assert bits.item() % 2**64 == expected


def test_bits_are_fair_and_neighbours_unrelated():
    """Each of 64 bits over a million values within 5.5 deviations of one half (false alarm 2 in 10^6)."""
    bits = random_bits(5, torch.arange(250), torch.arange(4000)).flatten()
    for shift in range(64):
        ones = ((bits >> shift) & 1).double().mean().item()
        assert abs(ones - 0.5) < 5.5 * 0.5 / math.sqrt(len(bits))
    drawn = gumbel(5, torch.arange(250), torch.arange(4000))
    for a, b in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].item()
        assert abs(correlation) < 6 / math.sqrt(a.numel())


def test_gumbel_distribution_with_its_tail():
    """Chi-square over 16 cells equal in probability, the last one cut again at 2^-7 .. 2^-15; odds 1 in 10^6."""
    drawn = gumbel(11, torch.arange(200), torch.arange(5000)).flatten()
    survival = [k / 16 for k in range(15, 0, -1)] + [2.0**-e for e in range(7, 16, 2)]
    edges = [-math.log(-math.log1p(-s)) for s in survival]
    counts = torch.histc(torch.bucketize(drawn, torch.tensor(edges, dtype=torch.float64)).double(), len(edges) + 1)
    mass = torch.tensor([1.0, *survival]) - torch.tensor([*survival, 0.0])
    expected = mass * len(drawn)
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square_tail(statistic, len(edges)) > 1e-6
    assert torch.isfinite(drawn).all()


def test_noise_is_the_same_however_few_positions_are_made_at_a_time(monkeypatch):
    positions, tokens = torch.arange(7, 20), torch.arange(50)
    whole = gumbel(5, positions, tokens)
    for numbers in (1, 50, 199, 450):
        monkeypatch.setattr(noise, "_CACHED", numbers)
        assert torch.equal(gumbel(5, positions, tokens), whole)


def test_rows_do_not_depend_on_what_was_asked_before():
    fresh = torch.cat([gumbel(3, torch.tensor([position]), torch.arange(50)) for position in range(40, 45)])
    used = NoiseRows(3, 50, CPU, block=4)
    for first, count, skip in ((0, 1, 0), (1, 9, 0), (39, 2, 3), (38, 6, 0)):
        used.rows(first, count, skip)
    assert torch.equal(used.rows(40, 5), fresh)
    assert torch.equal(used.rows(38, 1, skip=4)[0], fresh[2])
    assert not torch.equal(NoiseRows(4, 50, CPU).rows(40, 5), fresh)


@pytest.mark.parametrize("size", [500, noise._LARGE])
def test_noise_of_some_tokens_is_that_of_all(size, monkeypatch):
    """Of a large vocabulary it is made for these alone, once for many positions, unless that of all is there."""
    rows, some, other = NoiseRows(3, size, CPU), torch.arange(0, size, 7), torch.arange(9)
    expected = gumbel(3, torch.arange(40, 60), torch.arange(size))
    made = []
    monkeypatch.setattr(noise, "gumbel", lambda *args: made.append(len(args[2])) or gumbel(*args))
    for ids, first in ((some, 42), (some, 44), (other, 42)):
        assert torch.equal(rows.rows(first, 5, 2, ids), expected[first - 38 : first - 33, ids])
    assert made == ([len(some), len(other)] if size == noise._LARGE else [size])
    rows.rows(42, 8)
    made.clear()
    assert torch.equal(rows.rows(42, 5, 2, some), expected[4:9, some])
    assert not made


def test_noise_is_finite_at_its_ends(monkeypatch):
    for bits, expected in ((0, 36.7368), (-1, -3.6037)):
        monkeypatch.setattr(noise, "random_bits", lambda *_, bits=bits: torch.tensor([[bits]]))
        assert float(gumbel(0, torch.tensor([0]), torch.tensor([0]))) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("whole", [False, True])
def test_texts_are_the_same_with_noise_for_few_tokens(model, prompt, monkeypatch, whole):
    """As for a large vocabulary: token for token, and draft for draft."""
    monkeypatch.setattr(Target, "draws_whole_trees", whole)
    heads = {kind: random_heads(model, kind=kind) for kind in ("chained", "gated")}
    for each in heads.values():
        each.draft_to_target = torch.arange(0, VOCAB, 2)

    def runs():
        for kind, each in heads.items():
            for sampling in (SamplingParams(seed=3), SamplingParams(seed=4, min_p=0.1, repetition_penalty=1.2)):
                for method in ("ar", "medusa") if kind == "gated" else ("tokenswift",):
                    options = TokenSwiftOptions(tree=(1, 2, 2))
                    out = Decoder(model, heads=each).generate(prompt, 60, method, sampling, options)
                    yield out.token_ids, out.stats.accepted_by_depth

    expected = list(runs())
    monkeypatch.setattr(noise, "_LARGE", 8)
    assert list(runs()) == expected


@pytest.mark.parametrize("method", ["ar", "tokenswift", "magicdec", "auto"])
def test_noise_is_made_once_for_many_positions(model, prompt, monkeypatch, method):
    """For drafts and tokens alike, whoever asks first: a block costs a large vocabulary tens of milliseconds."""
    made = []
    monkeypatch.setattr("decoder.sampling.noise.gumbel", lambda *args: made.append(len(args[1])) or gumbel(*args))
    dec = Decoder(model, heads=random_heads(model, kind="gated"), draft_model=tiny_llama(num_hidden_layers=1))
    for whole in (False, True):
        monkeypatch.setattr(Target, "draws_whole_trees", whole)
        made.clear()
        dec.generate(prompt, 160, method, SamplingParams(seed=3))
        # In blocks of 16 positions and a few more.
        assert len(made) <= 12
        assert sum(made) <= 240
