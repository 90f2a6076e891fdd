"""Compiles the native library into a wheel where there is a C compiler; CC names one for another machine.

Without one the wheel has no library, and it is compiled when it is first needed, if it can be.
"""

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "decoder/backends/native"


class NativeLibrary(BuildHookInterface):
    """The hook of wheels: they are for one kind of machine if they have the library."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # its sources may change
        self._temporary = TemporaryDirectory(prefix="tokenswift-decoder-")
        compiling = _compiling(Path(self.root))
        made = compiling.compiled_for_shipping(Path(self._temporary.name), os.environ.get("CC"))
        if isinstance(made, str):
            self.app.display_warning(f"The wheel has no native library: {made}.")
            return
        file, machine = made
        build_data["force_include"][str(file)] = f"{FOLDER}/{file.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._temporary.cleanup()


def _compiling(root: Path) -> ModuleType:
    """The package's module, without the package, which needs what is not installed here."""
    spec = spec_from_file_location("compiling", root / "src" / FOLDER / "compiling.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
