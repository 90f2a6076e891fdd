"""How to draft and how to keep the cache: settings that, but for two that say so, never change the text."""

from collections.abc import Sequence
from dataclasses import dataclass

from decoder.checks import meant, shown

MIN_BUDGET, MAX_BUDGET = 64, 4096  # of the default; the paper takes the 4,096 tokens of its prompts (section 4.1)
PAPER_TREE, PAPER_NGRAMS = (1, 3, 3, 3), 20  # section 3.3, and its k
METHOD_NAMES = (
    "ar",
    "tokenswift",
    "medusa",
    "eagle3",
    "draft-model",
    "triforce",
    "magicdec",
    "prompt-lookup",
    "suffix",
    "tokenswift-fused",
    "auto",
)
CACHES = ("dynamic", "static", "full")
DRAFT_CACHES = ("streaming", "snapkv")
VERIFICATIONS = ("exact", "independent")
KV_DTYPES = ("int8", "fp8")
_END = 2**63  # of counts, as sampling has it


@dataclass(frozen=True)
class TokenSwiftOptions:
    """Settings of the drafters; a drafter ignores those that do not apply to it.

    Args:
        tree: branching per depth, or an explicit set of paths. Of a branching the first number counts candidates for
            the next token, the i-th those of the i-th head under every parent; (1, 3, 3, 3) is the paper's tree
            (section 3.3). A path gives the rank taken at each depth: ((0, 0, 0), (0, 1), (1,)) has 5 nodes below the
            root, the prefix (0,) and (0, 0) included. None lets ``tokenswift``, ``tokenswift-fused``, ``medusa`` and
            ``eagle3`` choose in each step, of all their candidates, those that raise tokens per second by what
            verifications cost on this machine and how often such candidates were accepted, as ``auto`` and ``suffix``
            always do; elsewhere it stands for the paper's tree.
        ngrams: how many n-grams are retrieved per step (the paper's k); 0 switches reutilisation off. None is the
            paper's 20, of which those that do not pay are left out where ``tree`` is None.
        ngram_delay: let generated tokens enter the n-gram table only once they have left the penalty window, inside
            which they are unlikely to come again.
        budget: slots of the partial cache (|B|); None takes the prompt length, at least 64 and at most 4,096.
        sink: attention-sink positions that always stay in the partial cache (|S|).
        cache: the draft pass's memory: ``dynamic`` (rebuilt by importance), ``static`` (chosen once) or ``full``.
        draft_cache: ``magicdec``'s memory: ``streaming`` (sinks and newest entries) or ``snapkv`` (those of the prompt
            that its end attends to, and newest entries).
        draft_budget: slots of the small model's cache in ``triforce``; None takes the partial cache's.
        coupled: rank draft candidates by log q + the noise of their position instead of log q.
        verification: ``exact``: one draw per node from that node's own context, so the text is AR's. ``independent``:
            the paper's Algorithm 1 as written, an own draw per candidate path of which the longest match wins. It
            favours drafted tokens, so the text is *not* distributed as AR's; for reproduction only.
        offload: keep the full cache in host memory, for texts whose cache does not fit the device; passes are handed it
            layer by layer, and draft caches stay on the device. The text is the same.
        kv_dtype: keep the full cache in one byte per number, ``int8`` or ``fp8``, with a scale per token and KV head.
            This rounds what the model attends to, so the text is that of ``ar`` with the same ``kv_dtype``, which is
            another one than without. None keeps the model's numbers.

    Raises:
        ValueError: a value out of range; the message names the field.
    """

    tree: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    ngrams: int | None = None
    budget: int | None = None
    sink: int = 16
    cache: str = "dynamic"
    coupled: bool = True
    verification: str = "exact"
    ngram_delay: bool = False
    draft_cache: str = "streaming"
    draft_budget: int | None = None
    offload: bool = False
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.tree is not None:
            object.__setattr__(self, "tree", _checked_tree(self.tree))
        for name in ("coupled", "ngram_delay", "offload"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {shown(getattr(self, name))}")
        for name in ("ngrams", "sink"):
            value = getattr(self, name)
            if value is None and name == "ngrams":
                continue
            if type(value) is not int or not 0 <= value < _END:
                raise ValueError(f"{name} must be an integer of at least 0 and below 2**63, not {shown(value)}")
        for name in ("budget", "draft_budget"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not self.sink < value < _END):
                words = f"an integer above sink ({self.sink}) and below 2**63"
                raise ValueError(f"{name} must be {words}, not {shown(value)}")
        choices = {"cache": CACHES, "draft_cache": DRAFT_CACHES, "verification": VERIFICATIONS}
        if self.kv_dtype is not None:
            choices["kv_dtype"] = KV_DTYPES
        for name, known in choices.items():
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {shown(value)}{meant(value, known)}")

    @property
    def fixed_tree(self) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        """``tree``, or the paper's where none is given."""
        return PAPER_TREE if self.tree is None else self.tree

    @property
    def retrieved_ngrams(self) -> int:
        """``ngrams``, or the paper's k where none is given."""
        return PAPER_NGRAMS if self.ngrams is None else self.ngrams

    @property
    def depth(self) -> int:
        """Levels of the fixed tree: drafted tokens on its longest path."""
        tree = self.fixed_tree
        return len(tree) if isinstance(tree[0], int) else max(len(path) for path in tree)

    def budget_for(self, prompt_tokens: int) -> int:
        """Slots of the partial cache for a prompt of ``prompt_tokens`` tokens."""
        return (
            self.budget if self.budget is not None else max(MIN_BUDGET, self.sink + 1, min(prompt_tokens, MAX_BUDGET))
        )


def parse_tree(text: str) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
    """A tree as it is written on a command line: ``1,3,3,3`` (branching), or ``0.0.0 0.1 1`` (paths of ranks).

    Raises:
        ValueError: neither of these.
    """
    try:
        if "." in text or " " in text.strip():
            return tuple(tuple(int(rank) for rank in path.split(".")) for path in text.split())
        return tuple(int(count) for count in text.split(","))
    except ValueError:
        raise ValueError(
            f"tree is written as branching per depth (1,3,3,3) or as paths of ranks (0.0.0 0.1 1), not {shown(text)}"
        ) from None


def _checked_tree(tree) -> tuple:
    """The tree as nested tuples; a ValueError that says what a tree is."""
    if isinstance(tree, Sequence) and not isinstance(tree, str | bytes) and tree:
        if all(type(count) is int and 0 < count < _END for count in tree):
            return tuple(tree)
        if all(
            isinstance(path, Sequence) and path and all(type(rank) is int and 0 <= rank < _END for rank in path)
            for path in tree
        ):
            return tuple(tuple(path) for path in tree)
    raise ValueError(
        "tree must be positive integers, one per depth, or paths of ranks such as ((0, 0), (0, 1), (1,)), not "
        + shown(tree)
    )
