"""What a row of a comparison runs: a method of the decoder, transformers' own generate, llama.cpp, or a server."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import decoder
from decoder.drafters import METHODS, prompt_lookup
from decoder.options import parse_tree
from decoder.parts import meant

HF_ASSISTED = "hf-assisted"
HF: dict[str, dict] = {
    "hf": {},
    HF_ASSISTED: {},
    "hf-prompt-lookup": {
        "prompt_lookup_num_tokens": prompt_lookup.CHAIN,
        "max_matching_ngram_size": prompt_lookup.LONGEST_SUFFIX,
    },
}
"""transformers' own rows, and what their generate is given besides the sampling: the lookup is our prompt-lookup's, and
the assistant is the draft model."""
ENDPOINT = "endpoint"
"""The row of a server, which --endpoint names."""
LLAMA_CPP = "llama.cpp"
LLAMA_LOOKUP = "llama.cpp-prompt-lookup"
LLAMA_DRAFT_MODEL = "llama.cpp-draft-model"
LLAMA = (LLAMA_CPP, LLAMA_LOOKUP, LLAMA_DRAFT_MODEL)
"""llama.cpp's own rows."""
NEED_DRAFT_MODEL = ("draft-model", "triforce", HF_ASSISTED, LLAMA_DRAFT_MODEL)


@dataclass(frozen=True)
class MethodSpec:
    """A row of the comparison: a method with options and heads of its own, written ``NAME[:option=value...]``.

    ``text``, the specification as written, names the row. A tree is written as on the command
    line: ``tokenswift:tree=1,3,3,3:ngrams=20``; ``heads=CHECKPOINT`` is the checkpoint of this row alone.
    ``llama.cpp:endpoint=URL`` is a llama-server, which drafts as it was started.
    """

    text: str
    name: str
    options: dict = field(default_factory=dict)
    heads: str | None = None
    endpoint: str | None = None

    @property
    def is_hf(self) -> bool:
        return self.name in HF

    @property
    def is_outside(self) -> bool:
        """Whether others than this project's decoder generate the texts."""
        return self.is_hf or self.is_llama or self.name == ENDPOINT

    @property
    def is_llama(self) -> bool:
        return self.name in LLAMA

    @classmethod
    def parse(cls, text: str) -> "MethodSpec":
        """Raises ValueError for an unknown method or option, or a value that does not read as the option's kind."""
        name, *pairs = text.split(":")
        if name not in (*row_names(), ENDPOINT):
            raise ValueError(f"unknown method {name!r}{meant(name, row_names())}: choose from {', '.join(row_names())}")
        if text.startswith(f"{LLAMA_CPP}:endpoint="):
            return cls(text, name, endpoint=text.partition("=")[2])
        if name in LLAMA and pairs:
            raise ValueError(
                f"llama.cpp's rows take no options but a server's address, {LLAMA_CPP}:endpoint=URL, unlike {text!r}"
            )
        if name in (*HF, ENDPOINT) and pairs:
            raise ValueError(f"{name} is not decoded here and takes no options, unlike {text!r}")
        defaults = asdict(decoder.TokenSwiftOptions())
        options, heads = {}, None
        for pair in pairs:
            option, equals, value = pair.partition("=")
            if option == "heads" and value:
                if not METHODS[name].heads_kinds:
                    raise ValueError(f"{name} drafts without heads: leave out {pair!r} in {text!r}")
                heads = value
                continue
            if option == "kv_dtype":
                raise ValueError(
                    f"kv_dtype makes another text: leave it out of {text!r}, and give --kv-dtype for all rows"
                )
            if option not in defaults or not equals:
                known = ["heads", *defaults]
                raise ValueError(
                    f"unknown option {pair!r} in {text!r}{meant(option, known)}: options are {', '.join(known)}"
                )
            try:
                options[option] = parse_tree(value) if option == "tree" else _read_like(defaults[option], value)
            except ValueError as error:
                raise ValueError(f"{value!r} does not fit the option {option} in {text!r}") from error
        return cls(text, name, options, heads)


def row_names() -> list[str]:
    """What can be compared: the decoder's methods, transformers' own generate, and llama.cpp."""
    return [*decoder.methods(), *HF, *LLAMA]


def plain_row(spec: MethodSpec, specs: Sequence[MethodSpec]) -> str | None:
    """Of ``specs`` the row of the same engine that drafts nothing, of llama.cpp's the first, which may be a server."""
    names = ("hf",) if spec.is_hf else (LLAMA_CPP,) if spec.is_llama else ("ar",)
    if spec.name == ENDPOINT:
        return None
    return next((each.text for each in specs if each.name in names), None)


def _read_like(default: object, value: str) -> object:
    """``value`` read as what ``default`` is; None stands for a number that has no default."""
    if isinstance(default, bool):
        if value not in ("true", "false"):
            raise ValueError(f"{value!r} is neither true nor false")
        return value == "true"
    return value if isinstance(default, str) else int(value)
