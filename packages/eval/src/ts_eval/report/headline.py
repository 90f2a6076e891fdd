"""What the report opens with: a card per method with its speed-up, its spread, and whether its text is ar's."""

from dataclasses import dataclass

from ts_eval.comparing.checks import differs
from ts_eval.comparing.method_spec import ENDPOINT
from ts_eval.report.table import count_of, number, spread, times

MARKS = {"same": "✓", "tie": "≈", "other": "✗"}
"""What stands before a card's words on identity, by its verdict."""
EVEN = 0.02
"""How far a speed-up may be from 1 to count as none."""


@dataclass(frozen=True)
class Card:
    """A method in a few words.

    Attributes:
        figure: the large one: the speed-up over ar, of ar its tokens per second.
        beside: what the figure is, with its spread.
        identity: whether the texts are ar's.
        verdict: "same", "tie", "other" or "none", by which the page marks ``identity``.
        facts: further figures.
        pace: "faster" or "slower" than ar, or "even", by which the page colours the card.
    """

    method: str
    figure: str
    beside: str
    identity: str
    verdict: str
    facts: list[str]
    pace: str = "even"


def cards(results: dict) -> list[Card]:
    """A card per row, the fastest first and ar last."""
    batch = results["settings"]["batch"] > 1
    made = []
    for name, row in results["methods"].items():
        speed = f"{number(row['tokens_per_second'], 1)} tokens/s"
        facts = [] if row["tokens_per_step"] is None else [f"{row['tokens_per_step']:.2f} tokens per step"]
        if batch:
            facts.append(f"{number(row['throughput'], 1)} tokens/s of all texts together")
        if name == "ar":
            runs = count_of(len(row["runs"]), "text")
            made.append(Card(name, speed, "the reference", f"{runs} of plain decoding", "none", facts))
            continue
        identity, verdict = identity_in_words(results, name)
        beside, facts = _beside(row), [speed, *facts]
        made.append(Card(name, times(row["speedup"]), beside, identity, verdict, facts, _pace(row["speedup"])))
    return sorted(made, key=lambda card: (card.method == "ar", -(results["methods"][card.method]["speedup"] or 0)))


def _pace(speedup: float | None) -> str:
    if speedup is None or abs(speedup - 1) < EVEN:
        return "even"
    return "faster" if speedup > 1 else "slower"


def _beside(row: dict) -> str:
    runs = len(row["runs"])
    if runs < 2 or row["speedup_range"] is None:
        return "the speed of ar, one text"
    if row["speedup_interval"] is not None:
        return f"the speed of ar, 95% interval over prompts {spread(row['speedup_interval'])}"
    return f"the speed of ar, {spread(row['speedup_range'])} over {runs} texts"


def identity_in_words(results: dict, name: str) -> tuple[str, str]:
    """What to say of a row's identity with ar, and the verdict of `Card`."""
    row = results["methods"][name]
    compared = [run for run in row["runs"] if run["identical_to_ar"] is not None]
    if name == ENDPOINT:
        return "a server, whose speed alone is compared", "none"
    if not compared and row.get("own_plain"):
        plain, same = row["own_plain"], row["identical_to_own_plain"]
        return f"{'the text of' if same else 'another text than'} {plain}, its engine's plain decoding", "none"
    if not compared:
        return "another text than ar's: it draws other noise or penalises otherwise", "none"
    same = sum(run["identical_to_ar"] for run in compared)
    if same == len(compared):
        of = "the text" if same == 1 else f"all {same:,} texts"
        return f"{of} the same as ar's, token for token", "same"
    where = f"{same:,} of {count_of(len(compared), 'text')} the same as ar's, the first difference at token"
    if name in differs(results):
        return f"{where} {row['first_divergence']:,}", "other"
    return f"{where} {row['first_divergence']:,}, a tie that rounding decides", "tie"
