"""A comparison as a YAML file: ``ts-eval compare --config FILE``, and `run.yaml` in every output folder."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from decoder.parts import decoded, parse_yaml
from ts_eval.comparing.results import write_text

if TYPE_CHECKING:
    from ts_eval.compare import Experiment

RUN_FILE = "run.yaml"
_NOT_KEPT = ("output", "overwrite", "extend", "rank", "arguments")
"""What tells where results go or who asked, not what is compared."""
_RENAMED = {"audit": "check_lossless"}
"""Fields whose flag has another name."""


def read_run_file(path: str) -> dict:
    """The content of a file, by key: the flags' names, with underscores or hyphens, and ``methods``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no UTF-8 text, no YAML mapping, has a key twice, or a number or a text that no float and no
            UTF-8 holds.
    """
    content = parse_yaml(decoded(Path(path).read_bytes(), path), path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no YAML mapping such as methods: [ar, tokenswift]")
    found: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in found:
            raise ValueError(f"{name} in {path} is there twice, with hyphens and without: leave one out")
        found[name] = value
    return {name: value for name, value in found.items() if value is not None}


def write_run_file(experiment: "Experiment") -> None:
    """Write `run.yaml` into the output folder: what repeats the comparison elsewhere. Raises OSError, naming it."""
    content: dict[str, object] = {}
    for field in fields(experiment):
        value = getattr(experiment, field.name)
        if field.name in ("sampling", "options"):
            content |= {name: _plain(each) for name, each in (value or {}).items()}
        elif field.name not in _NOT_KEPT and value is not None:
            content[_RENAMED.get(field.name, field.name)] = _plain(value)
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    write_text(Path(experiment.output) / RUN_FILE, f"# ts-eval compare --config {RUN_FILE} --output ...\n{text}")


def _plain(value: object) -> object:
    """``value`` without what YAML would mark as Python's own."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
