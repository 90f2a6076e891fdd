"""Where the reference model, its heads and the books lie."""

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

REFERENCE_MODEL = "reference-model"
DRAFT_MODEL = "draft-model"
HOW_TO_GET_IT = (
    "the reference model and the books are in the repository's folder data/: clone the repository and name that "
    "folder with --data-dir or TS_DATA_DIR, or name your own with --model and --prompts"
)


def find_data_dir(named: str | Path | None = None) -> Path:
    """The data folder: ``named`` if given, else the one of the checkout that this package was installed from.

    Raises:
        FileNotFoundError: there is none; the message says how to get it.
    """
    if named is not None:
        if not Path(named).is_dir():
            raise FileNotFoundError(f"the data folder {named} does not exist")
        return Path(named)
    checkout = _checkout()
    if checkout is None or not (checkout / "data").is_dir():
        raise FileNotFoundError(HOW_TO_GET_IT)
    return checkout / "data"


def _checkout() -> Path | None:
    """The checkout whose packages/eval was installed, editable or not, as pip recorded it (PEP 610)."""
    try:
        record = metadata.distribution("tokenswift-eval").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(record)["url"]) if record else None
    if url is None or url.scheme != "file":
        return None
    return Path(url2pathname(url.path)).parent.parent
