"""Which model, draft model and heads the rows run with, from what a user names, and their loading."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import decoder
from decoder.drafters import METHODS, Drafter
from decoder.heads import MTP, kind_in
from decoder.parts import heads_beside
from ts_eval.comparing import checkpoints
from ts_eval.comparing.data_dir import DRAFT_MODEL, REFERENCE_MODEL, find_data_dir
from ts_eval.comparing.method_spec import NEED_DRAFT_MODEL, MethodSpec
from ts_eval.comparing.results import digest_files

DEFAULT_KINDS = {
    "tokenswift": "chained",
    "medusa": "independent",
    "eagle3": "eagle3",
    "tokenswift-fused": "gated",
    "auto": "gated",
}
"""The kind of heads that suits a method best; the data folder has the reference model's own as heads-KIND."""


@dataclass(frozen=True)
class Sources:
    """Folders, GGUF files or hub ids: the model, the draft model, and heads by row (only where used).

    With ``tensor_parallel`` processes share the model; ``yarn`` is as in `decoder.load`.
    """

    model: str
    draft_model: str | None
    heads: dict[str, str]
    tensor_parallel: bool = field(default=False, kw_only=True)
    yarn: float | None = field(default=None, kw_only=True)

    @classmethod
    def find(
        cls,
        specs: Sequence[MethodSpec],
        model: str | None,
        heads: Sequence[str],
        draft_model: str | None,
        data_dir: str | Path | None,
    ) -> "Sources":
        """What ``specs`` run with; without a ``model`` the reference model, with its heads and draft model.

        Where no heads are named for a model's folder, a method takes those that `decoder.heads_beside` finds there.

        Raises:
            ValueError: ``heads`` are several checkpoints, or pairs with what is no method.
            FileNotFoundError: there is no data folder.
        """
        own_heads = {}
        if model is None:
            data = find_data_dir(data_dir)
            model = str(data / REFERENCE_MODEL)
            folders = {name: data / f"heads-{kind}" for name, kind in DEFAULT_KINDS.items()}
            own_heads = {name: str(folder) for name, folder in folders.items() if folder.exists()}
            if draft_model is None and any(spec.name in NEED_DRAFT_MODEL for spec in specs):
                draft_model = str(data / DRAFT_MODEL)
        else:
            own_heads = heads_beside(model)
        return cls(model, draft_model, _heads_by_method(specs, heads, own_heads))

    def refuse_missing(self, specs: Sequence[MethodSpec]) -> None:
        """Refuse, before anything is loaded, a folder that is not there, and a method without heads or draft model."""
        checkpoints.refuse_missing("model", self.model)
        checkpoints.refuse_missing("draft model", self.draft_model)
        for path in set(self.heads.values()) - {MTP}:
            checkpoints.refuse_missing("heads", path, holding=None)
        for spec in specs:
            if not spec.is_outside and METHODS[spec.name].needs_heads and spec.text not in self.heads:
                raise ValueError(f"{spec.name} needs draft heads: give --heads CHECKPOINT or {spec.name}=CHECKPOINT")
            if spec.name in NEED_DRAFT_MODEL and self.draft_model is None:
                raise ValueError(f"{spec.name} needs a small model with the same vocabulary: give --draft-model")

    def lacking(self, specs: Sequence[MethodSpec]) -> dict[str, str]:
        """The rows whose heads or draft model are missing, and the reason. Raises as `refuse_missing` for the model."""
        reasons = {}
        for spec in specs:
            try:
                self.refuse_missing([spec])
            except ValueError as error:
                reasons[spec.text] = str(error)
        return reasons

    def weights(self) -> dict[str, str | None]:
        """What tells two versions of each local checkpoint apart; None for the hub's, which an id's revision tells."""
        paths = (self.model, self.draft_model, *self.heads.values())
        return {path: _digest(Path(path)) for path in paths if path}

    def load(self, device: str, dtype: str, bitwise: bool | None = None) -> "dict[str | None, decoder.Decoder]":
        """Heads checkpoint (or None) -> Decoder; all share the one loaded model. Raises as `decoder.load`."""
        wanted: bool | Literal["auto"] = "auto" if bitwise is None else bitwise
        with checkpoints.named(self.model):
            plain = decoder.load(
                self.model,
                draft_model=self.draft_model,
                device=device,
                dtype=dtype,
                bitwise=wanted,
                tensor_parallel=self.tensor_parallel,
                yarn=self.yarn,
            )
        if plain.tokenizer is None:
            raise ValueError(f"{self.model} has no tokenizer, which the prompts need")
        loaded: dict[str | None, decoder.Decoder] = {None: plain}
        for path in dict.fromkeys(self.heads.values()):
            loaded[path] = decoder.Decoder(plain.model, plain.tokenizer, path, plain.draft_model, wanted)
        return loaded


def _digest(path: Path) -> str | None:
    """Tells two versions of a folder, or of a GGUF file, apart; None for a hub id."""
    if path.is_file():
        return digest_files(path.parent, glob.escape(path.name))
    return digest_files(path) if path.is_dir() else None


def with_ar(methods: Sequence[str]) -> list[MethodSpec]:
    """The rows of ``methods``, each once; ``ar`` first when it is not among them."""
    specs = [MethodSpec.parse(text) for text in dict.fromkeys(methods)]
    return specs if any(spec.text == "ar" for spec in specs) else [MethodSpec.parse("ar"), *specs]


def _heads_by_method(specs: Sequence[MethodSpec], heads: Sequence[str], own: dict[str, str]) -> dict[str, str]:
    """Row -> heads checkpoint, for the rows that have one: the row's, the method's, the one for all, or the model's."""
    pairs, for_all = {}, []
    for entry in heads:
        name, equals, path = entry.partition("=")
        if equals and name in decoder.methods():
            pairs[name] = path
        elif equals and not Path(entry).exists():
            raise ValueError(f"--heads {entry}: {name!r} is no method; methods are {', '.join(decoder.methods())}")
        else:
            for_all.append(entry)
    if len(for_all) > 1:
        raise ValueError("--heads takes one checkpoint, or METHOD=CHECKPOINT pairs, not several checkpoints")
    for_each = {name: for_all[0] for name, each in METHODS.items() if _suits(for_all[0], each)} if for_all else own
    usual = {spec.name: pairs.get(spec.name, for_each.get(spec.name)) for spec in specs}
    found = {spec.text: spec.heads or usual[spec.name] for spec in specs}
    needing = {spec.text for spec in specs if not spec.is_outside and METHODS[spec.name].heads_kinds}
    return {text: path for text, path in found.items() if path and text in needing}


def _suits(checkpoint: str, method: type[Drafter]) -> bool:
    """Whether a method can run with the heads of a checkpoint, as far as a folder's configuration tells."""
    kind = MTP if checkpoint == MTP else kind_in(checkpoint)
    return kind is None or kind in method.heads_kinds
