"""Measured costs of verifications, by nodes, length and texts."""

import pytest

from decoder import Decoder
from decoder.cache.full import FullCache
from decoder.drafters.tuning.verify_costs import WIDEST, VerifyCosts


def with_seconds(model, monkeypatch, seconds):
    measured = []

    def at(self, width, cache):
        measured.append(width)
        return seconds(width)

    monkeypatch.setattr(VerifyCosts, "_seconds", at)
    return VerifyCosts(Decoder(model).target), measured


def test_powers_of_two_are_measured_and_others_lie_between(model, monkeypatch):
    costs, measured = with_seconds(model, monkeypatch, lambda width: 1.0 + width**2)
    table = costs.at(FullCache(1))
    assert measured == 3 * [1, 2, 4, 8, 16, 32, 64]
    assert len(table) == WIDEST + 1
    assert all(table[width] == 1.0 + width**2 for width in measured)
    assert table[24] == pytest.approx((table[16] + table[32]) / 2)


def test_costs_never_fall_with_the_number_of_nodes(model, monkeypatch):
    """Whatever disturbed a measurement."""
    costs, _ = with_seconds(model, monkeypatch, lambda width: 5.0 if width == 4 else 1.0 + 0.1 * width)
    table = costs.at(FullCache(1))
    assert table[1:] == sorted(table[1:])
    assert table[4] == table[16] == 5.0


def test_the_best_of_all_times_counts(model, monkeypatch):
    """A moment in which the machine is slow spoils none of the widths."""
    turns = iter([9.0] * 13 + [1.0] * 100)
    costs, _ = with_seconds(model, monkeypatch, lambda width: next(turns))
    assert costs.at(FullCache(1))[1:] == [1.0] * WIDEST


def test_they_are_measured_once_until_the_text_is_twice_as_long(model, monkeypatch):
    costs, measured = with_seconds(model, monkeypatch, lambda width: 1.0)
    cache = FullCache(1)
    for length, times in ((0, 1), (1000, 1), (2000, 1), (2047, 2), (2048, 2), (4000, 2), (4100, 3), (1100, 3)):
        cache.length = length
        costs.at(cache)
        assert measured.count(64) == 3 * times


def test_many_texts_share_a_pass(model, monkeypatch):
    """Each pays its share of a pass over all of their trees; beyond the widest one measured its slope goes on."""
    costs, measured = with_seconds(model, monkeypatch, lambda width: 8.0 + width)
    table = costs.at(FullCache(1), texts=8)
    assert table[1] == pytest.approx(16 / 8)
    assert table[4] == pytest.approx(40 / 8)
    assert table[64] == pytest.approx((8 + 512) / 8)
    assert costs.at(FullCache(1))[1] == 9.0
    assert measured.count(64) == 3
    # Where each text has a pass of its own nothing is shared.
    costs.target.flattens = False
    assert costs.at(FullCache(1), texts=8) == costs.at(FullCache(1))
    # A node more costs a text alone an eighth of a step, one of many more than half of theirs.
    assert (table[2] - table[1]) / table[1] > 4 * (1.0 / 9.0)
