"""The time of a whole text against numbers worked out by hand."""

import pytest

from ts_eval.comparing.method_spec import MethodSpec
from ts_eval.measuring.computed import Assumption, computed, mean_along, read_assumptions


def at(length: int, ar: float, verify: dict[int, float]) -> dict:
    cells = [{"width": width, "ms": {"median": value}} for width, value in verify.items()]
    return {"length": length, "ar": {"ms_per_token": {"median": ar}}, "verify": cells}


def test_a_mean_along_the_length_is_level_at_the_ends_and_straight_between():
    assert mean_along([(100, 4.0)], 1000) == 4.0
    # 100 at 2, 200 rising from 2 to 6, 100 at 6.
    assert mean_along([(300, 6.0), (100, 2.0)], 400) == pytest.approx((200 + 800 + 600) / 400)
    # Up to the middle of the slope.
    assert mean_along([(100, 2.0), (300, 6.0)], 200) == pytest.approx((200 + 300) / 200)
    assert mean_along([(100, 2.0), (300, 6.0)], 50) == pytest.approx(2.0)


def test_the_arithmetic_of_a_whole_text():
    lengths = [at(200, 4.0, {1: 3.0, 8: 5.0}), at(1000, 8.0, {1: 7.0, 8: 9.0})]
    shares = {"verify": 0.7, "draft": 0.1, "scoring": 0.1, "sampling": 0.05, "rest": 0.05}
    row = {"shares": {part: {"median": share} for part, share in shares.items()}, "watched_step_ms": {"median": 10.0}}
    made = computed(lengths, {"medusa": row}, {"medusa": Assumption(2.5, 8)})
    assert made["tokens"] == 1000
    # 200 tokens at 4 ms and 800 at 6 on average; 400 steps of 5 (.2) or 7 (.8) ms and 3 besides.
    assert made["methods"]["ar"]["seconds"] == pytest.approx(0.2 * 4 + 0.8 * 6)
    medusa = made["methods"]["medusa"]
    assert medusa["steps"] == 400
    assert medusa["pass_ms"] == pytest.approx(0.2 * 5 + 0.8 * 7) and medusa["besides_ms"] == pytest.approx(3.0)
    assert medusa["seconds"] == pytest.approx(0.4 * 9.6)
    assert medusa["speedup"] == pytest.approx(5.6 / 3.84)


def test_assumptions_name_rows_as_they_were_typed():
    specs = [MethodSpec.parse(text) for text in ("ar", "tokenswift-fused:tree=1,2", "medusa")]
    found = read_assumptions(["tokenswift-fused:tree=1,2=1.75@4", "medusa=2@64"], specs)
    assert found == {"tokenswift-fused:tree=1,2": Assumption(1.75, 4), "medusa": Assumption(2.0, 64)}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("medusa=2", "TOKENS@NODES"),
        ("medusa", "TOKENS@NODES"),
        ("medusa=two@8", "TOKENS@NODES"),
        ("medusa=2@8.5", "TOKENS@NODES"),
        ("medusa=0.5@8", "at least 1 token"),
        ("medusa=nan@8", "at least 1 token"),
        ("medusa=9@8", "no more than it has nodes"),
        ("tokenswift=2@8", "none of the rows ar, medusa, auto"),
        ("ar=1@1", "one token per step"),
        ("auto=2@8", "another tree in every step"),
    ],
)
def test_assumptions_that_cannot_be_are_refused(entry, reason):
    specs = [MethodSpec.parse(text) for text in ("ar", "medusa", "auto")]
    with pytest.raises(ValueError, match="--tokens-per-step") as error:
        read_assumptions([entry], specs)
    assert reason in str(error.value)
