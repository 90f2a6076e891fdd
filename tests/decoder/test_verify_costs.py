"""Measured costs of verifications, by nodes, length and texts."""

import pytest
import torch

from decoder import Decoder
from decoder.cache.form import CacheForm
from decoder.cache.full import FullCache
from decoder.cache.stored import full_cache
from decoder.drafters.tuning.verify_costs import WIDEST, VerifyCosts
from decoder.sampling.token_tree import TokenTree
from decoder.work import finish


def with_seconds(model, monkeypatch, seconds):
    measured = []

    def at(self, width, cache):
        measured.append(width)
        return seconds(width)

    monkeypatch.setattr(VerifyCosts, "_time", at)
    target = Decoder(model).target
    monkeypatch.setattr(target, "forward", lambda trees, caches: None)
    return VerifyCosts(target), measured


def begin(costs, cache):
    """A text begins, and all its work is done."""
    if (work := costs.begin(cache)) is not None:
        finish(work)


def test_powers_of_two_are_measured_and_others_lie_between(model, monkeypatch):
    costs, measured = with_seconds(model, monkeypatch, lambda width: 1e-3 + 1e-7 * width**2)
    table = costs.at(FullCache(1))
    assert sorted(measured) == sorted(5 * [1, 2, 4, 8, 16, 32, 64])
    assert len(table) == WIDEST + 1
    assert all(table[width] == 1e-3 + 1e-7 * width**2 for width in measured)
    assert table[24] == pytest.approx((table[16] + table[32]) / 2)


@pytest.mark.parametrize("narrowest, as_much", [(3, (1, 2, 3)), (6, (4, 5, 6))])
def test_nodes_in_rows_that_are_computed_anyway_cost_nothing(model, monkeypatch, narrowest, as_much):
    """Passes of up to three or six nodes are one width, whose last number of nodes is measured, too."""
    costs, _ = with_seconds(model, monkeypatch, lambda width: 1e-3 * max(narrowest, width))
    monkeypatch.setattr(costs.target, "width", lambda nodes: max(narrowest, nodes))
    table = costs.at(FullCache(1))
    assert {table[nodes] for nodes in as_much} == {1e-3 * narrowest}
    assert table[8] == pytest.approx(8e-3)


def test_costs_never_fall_with_the_number_of_nodes(model, monkeypatch):
    """Whatever disturbed a measurement."""
    costs, _ = with_seconds(model, monkeypatch, lambda width: 0.02 if width == 4 else 0.01 + 0.0001 * width)
    table = costs.at(FullCache(1))
    assert table[1:] == sorted(table[1:])
    assert table[4] == table[64] == 0.02


def test_the_best_of_all_times_counts(model, monkeypatch):
    """A moment in which the machine is slow spoils none of the widths."""
    turns = iter([1e-3] * 3 + [9.0] * 9 + [1e-3] * 100)
    costs, _ = with_seconds(model, monkeypatch, lambda width: next(turns))
    assert costs.at(FullCache(1))[1:] == [1e-3] * WIDEST


@pytest.mark.parametrize("first", range(12, 24))
def test_two_slow_passes_do_not_end_the_measuring(model, monkeypatch, first):
    """Wide trees would be taken to cost what a line through two narrow ones tells."""
    turns = iter([1e-3] * first + [9.0] * 2 + [1e-3] * 100)
    costs, measured = with_seconds(model, monkeypatch, lambda width: next(turns))
    assert costs.at(FullCache(1))[1:] == [1e-3] * WIDEST and 64 in measured


def test_a_large_models_wide_passes_are_not_waited_for(model, monkeypatch):
    """Four nodes cost as much as one, and each beyond them the same: eight are enough to know the others."""
    costs, measured = with_seconds(model, monkeypatch, lambda width: 0.3 + 0.2 * max(0, width - 4))
    table = costs.at(FullCache(1))
    # Nor is the first token made to wait for more than one pass of a width, once they are known to be slow.
    assert measured == [1, 1, 1, 2, 4, 8]
    assert table[1] == table[4] == pytest.approx(0.3)
    assert table[6] == pytest.approx(0.7) and table[64] == pytest.approx(12.3)
    # Where wide trees cost little, all are measured.
    costs, measured = with_seconds(model, monkeypatch, lambda width: 0.3 + 0.001 * width)
    assert costs.at(FullCache(1))[64] == pytest.approx(0.364)
    assert len(measured) == 9
    # The first pass of a width may take long where it is prepared then, too.
    costs, measured = with_seconds(model, monkeypatch, lambda width: 0.1 if width in measured[:-1] else 2.0)
    monkeypatch.setattr(costs.target.backend, "warm_up_runs", 2)
    assert costs.at(FullCache(1))[1:] == [0.1] * WIDEST
    # Where few nodes are padded to eight, a table does not end among them.
    costs, measured = with_seconds(model, monkeypatch, lambda width: 0.3 if width != 2 else 0.9)
    monkeypatch.setattr(costs.target, "width", lambda nodes: -(-nodes // 8) * 8)
    assert costs.at(FullCache(1))[64] == pytest.approx(0.9) and 64 in measured


def test_they_are_measured_once_until_the_text_is_twice_as_long(model, monkeypatch):
    costs, measured = with_seconds(model, monkeypatch, lambda width: 1e-3)
    cache = FullCache(1)
    for length, times in ((0, 1), (1000, 1), (2000, 1), (2047, 2), (2048, 2), (4000, 2), (4100, 3), (1100, 3)):
        cache.length = length
        costs.at(cache)
        assert measured.count(64) == 5 * times


@pytest.mark.parametrize("form", [CacheForm(), CacheForm(kv_dtype="fp8")])
def test_measuring_commits_nothing(model, form):
    dec = Decoder(model)
    cache, forward = full_cache(form, 400), dec.target.forward
    with torch.inference_mode(), dec.target.patched():
        dec.target.prefill([1, 2, 3, 4] * 23, cache)
        for length in (92, 93):
            expected = forward([TokenTree(5)], [cache])[0].logits.clone()
            for part in cache.parts:
                if part.is_floating_point():  # what memory may hold that was never written to
                    part[:, :, :, length:] = torch.nan
            VerifyCosts(dec.target).at(cache)
            assert cache.length == length
            assert torch.equal(forward([TokenTree(5)], [cache])[0].logits, expected)
            cache.keep([0])


def test_many_texts_share_a_pass(model, monkeypatch):
    """Each pays its share of a pass over all of their trees; beyond the widest one measured its slope goes on."""
    costs, measured = with_seconds(model, monkeypatch, lambda width: 0.08 + 0.001 * width)
    table = costs.at(FullCache(1), sequences=8)
    assert table[1] == pytest.approx(0.088 / 8)
    assert table[4] == pytest.approx(0.112 / 8)
    assert table[64] == pytest.approx(0.592 / 8)
    assert costs.at(FullCache(1))[1] == pytest.approx(0.081)
    assert measured.count(64) == 1
    # Where each text has a pass of its own nothing is shared.
    monkeypatch.setattr(costs.target.backend, "flattens", False)
    assert costs.at(FullCache(1), sequences=8) == costs.at(FullCache(1))
    # A node more costs a text alone an eightieth of a step, one of many an eleventh of theirs.
    assert (table[2] - table[1]) / table[1] > 4 * (1.0 / 81.0)


def test_what_was_measured_in_a_disturbed_moment_is_measured_again_when_later_texts_begin(model, monkeypatch):
    slow = [10.0]
    costs, measured = with_seconds(
        model, monkeypatch, lambda width: slow[0] * 1e-3 if width == 8 else 1e-3 + 1e-5 * width
    )
    cache, begun = FullCache(1), []
    for _ in range(18):
        before = len(measured)
        begin(costs, cache)
        begun.append(len(measured) - before)
        slow[0] = 1.0
        if len(begun) == 1:
            disturbed, shared = costs.at(cache), costs.at(cache, 3)
            assert 16 not in measured  # from a width on that costs so much others are not measured
    assert all(begun[:16]) and not any(begun[16:])
    assert costs.at(cache)[8] < 0.5 * disturbed[8] and costs.at(cache, 3)[8] < shared[8] and 16 in measured


def test_what_is_measured_again_delays_no_sequence_for_long(model, monkeypatch):
    """Of a slow model one number of nodes after the other, as many as take 50 ms; the shortest time counts."""
    slow = [2.0]
    costs, measured = with_seconds(model, monkeypatch, lambda width: slow[0] * (0.02 + 0.0005 * width))
    cache = FullCache(1)
    begin(costs, cache)
    disturbed = costs.at(cache)
    assert measured == [1, 1, 1, 2, 4, 8, 16, 32, 64]
    for slow[0], expected in ((1.0, [1]), (1.0, [2]), (1.0, [4]), (2.0, [8]), (1.0, [16]), (1.0, [32]), (1.0, [64])):
        measured.clear()
        begin(costs, cache)
        assert measured == expected
    measured.clear()
    begin(costs, cache)  # those were taken to be twice as slow as they are
    assert measured == [1, 2] and disturbed[1] == pytest.approx(0.041)
    assert costs.at(cache)[1] == pytest.approx(0.0205) and costs.at(cache)[16] == pytest.approx(0.048)
