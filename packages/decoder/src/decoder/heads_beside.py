"""Which heads a model is taken with where none are named: those in folders beside the model's own."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePath

from decoder.drafters import METHODS
from decoder.heads import MTP, base_model_in, kind_in

_PAPERS_KIND = {"tokenswift": "chained"}
"""What the paper trains for a method, where several kinds were trained on a model and none is called after it."""


def heads_beside(model: str | os.PathLike) -> dict[str, str]:
    """Method -> the folder of heads, beside a model's folder or GGUF file NAME, that it drafts with.

    Of a file those beside its folder are looked at, too, if their configuration names the file.

    Heads are called after the model where their folder is heads-NAME, heads-NAME-* or NAME-assistant; else a folder
    heads-* is the model's where its configuration tells that it was trained on a model called NAME. Of several kinds a
    method takes the one that suits it best, of several folders the first by name. A method that has none of these takes
    what the model has built in, whose folder is the model's own. Empty for a hub id.
    """
    path = Path(model)
    if not path.exists():
        return {}
    if path.name in ("", ".."):
        path = path.resolve()
    called: dict[str, str] = {}
    trained: dict[str, str] = {}
    around = [path.parent, path.parent.parent] if path.is_file() else [path.parent]
    assistant = path.with_name(f"{path.name}-assistant")
    for folder in (assistant, *(folder for place in around for folder in sorted(place.glob("heads-*")))):
        kind = kind_in(folder)
        if kind is None:
            continue
        is_called = folder.name == f"heads-{path.name}" or folder.name.startswith(f"heads-{path.name}-")
        if folder == assistant or (is_called and folder.parent == path.parent):
            called.setdefault(kind, str(folder))
        elif PurePath(base_model_in(folder) or "").name == path.name:
            trained.setdefault(kind, str(folder))
    found = {name: _first(method.heads_kinds, called) or _usual(name, trained) for name, method in METHODS.items()}
    lacking = [name for name, folder in found.items() if folder is None and MTP in METHODS[name].heads_kinds]
    if lacking and kind_in(path) == MTP:
        found |= dict.fromkeys(lacking, str(path))
    return {name: folder for name, folder in found.items() if folder is not None}


def _usual(method: str, by_kind: Mapping[str, str]) -> str | None:
    return by_kind.get(_PAPERS_KIND.get(method, "")) or _first(METHODS[method].heads_kinds, by_kind)


def _first(kinds: tuple[str, ...], by_kind: Mapping[str, str]) -> str | None:
    return next((by_kind[kind] for kind in kinds if kind in by_kind), None)
