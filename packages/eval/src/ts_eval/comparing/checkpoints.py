"""What a user names as a model: a folder, a GGUF file or a hub id, told apart and refused in a sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decoder.parts import is_gguf, meant_beside, open_checked


def refuse_missing(what: str, path: str | None, holding: str | None = "config.json") -> None:
    """Refuse at once, and offline, what is no folder with that file, no GGUF file of a model and no hub id."""
    if not path:
        return
    if (holding or what == "heads") and is_gguf(path):
        open_checked(path)
        return
    if not Path(path).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        near = meant_beside(path)
        raise FileNotFoundError(f"there is no {what} folder {path}{near}, and it is no hub id (owner/name) either")
    if holding and Path(path).is_dir() and not (Path(path) / holding).is_file():
        raise FileNotFoundError(f"the {what} folder {path} holds no {holding}")


@contextmanager
def named(path: str) -> Iterator[None]:
    """Say of transformers' paragraph which model it is about, and of its sentences the first, which has the reason."""
    try:
        yield
    except OSError as error:
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise OSError(f"{path} cannot be loaded: {reason}") from error
