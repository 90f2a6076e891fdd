"""transformers, imported without what one process on a CPU does not use, in less than half the time.

Its modelling code imports PyTorch's compiler to mark some functions for it, and PyTorch's tensors over several
processes for models that processes share: a thousand modules, of 1.5 seconds and 90 MB.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_MODELLING = ("transformers.masking_utils", "transformers.modeling_utils")
_COMPILER = "torch._dynamo"
_WRAPPED = f"{_COMPILER}._trace_wrapped_higher_order_op"
_UTILS, _STRUCTURE = "transformers.utils.import_utils", "define_import_structure"
# Of modules that need some packages, the names in them.
_Names = dict[frozenset[str], dict[str, set[str]]]


def import_transformers() -> None:
    """Import transformers' modelling code in a process that compiles no functions and shares no model with others.

    It takes PyTorch then for one that is built without support of several processes. Marks for the compiler are left
    out while it is imported. If it looks for anything else than these, now or in some other version, it is imported as
    always; and so it is where there are CUDA devices, or where somebody has imported one of these already.
    """
    if any(name in sys.modules for name in (*_MODELLING, _COMPILER)):
        return
    import torch

    if torch.cuda.is_available():
        return
    own = torch.distributed.is_available
    try:
        # Not only for now: what is not imported now must not be looked for later.
        vars(torch.distributed)["is_available"] = lambda: False
        with _without_compiler():
            _know_models()
            for name in _MODELLING:
                importlib.import_module(name)
    except Exception:
        vars(torch.distributed)["is_available"] = own
        # They have been told that there are no several processes.
        for name in [name for name in sys.modules if name.partition(".")[0] in ("accelerate", "transformers")]:
            del sys.modules[name]


@contextmanager
def _without_compiler() -> Iterator[None]:
    """A block in which modules find what they mark functions with, in place of the compiler's package."""
    package, wrapped = ModuleType(_COMPILER), ModuleType(_WRAPPED)
    vars(package).update(allow_in_graph=_unmarked, assume_constant_result=_unmarked, disable=_unmarked)
    vars(wrapped)["TransformGetItemToIndex"] = _index_by_tensors
    sys.modules |= {_COMPILER: package, _WRAPPED: wrapped}
    try:
        yield
    finally:
        del sys.modules[_COMPILER], sys.modules[_WRAPPED]


def _unmarked(function: Callable | None = None, *given: Any, **named: Any) -> Callable:
    return _unmarked if function is None else function


def _index_by_tensors() -> Any:
    """What is called when a mask of an unusual kind is made."""
    return importlib.import_module(_WRAPPED).TransformGetItemToIndex()


def _know_models() -> None:
    """Import the package of all models, whose two thousand files it would read to see what is in them."""
    with _replaced_when_run(_UTILS, _STRUCTURE, _known):
        importlib.import_module("transformers.models")


@contextmanager
def _replaced_when_run(name: str, function: str, by: Callable[[Callable], Callable]) -> Iterator[None]:
    """A block in which a function of a module is another one, made of it, from when the module has run."""
    modules: list[tuple[ModuleType, Callable]] = []

    class Finder:
        @staticmethod
        def find_spec(found: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(found, path) if found == name else None
            if spec is None or spec.loader is None:
                return None
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                modules.append((module, vars(module)[function]))
                vars(module)[function] = by(vars(module)[function])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    finder: Any = Finder
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module, own in modules:
            vars(module)[function] = own


def _known(own: Callable[..., _Names]) -> Callable[..., _Names]:
    """transformers' function that tells what is in the modules of a folder, which knows of the folder of all models."""

    def known(path: str | Path, prefix: str | None = None) -> _Names:
        folder = Path(vars(sys.modules[_UTILS])["__file__"]).parent.parent / "models"
        if (Path(path), prefix) == (folder, "models"):
            return _models_in(folder, own)
        if (Path(path), prefix) != (folder / "__init__.py", None):
            return own(path, prefix)
        found = {
            needs: {name.removeprefix("models."): of for name, of in modules.items() if name.startswith("models.")}
            for needs, modules in _models_in(folder, own).items()
        }
        return {needs: modules for needs, modules in found.items() if modules}

    return known


@cache
def _models_in(folder: Path, own: Callable[..., _Names]) -> _Names:
    """What transformers' ``own`` function finds there, or found in another process while no file has changed since."""
    from decoder.backends.kept import digest, keep, read_kept, state
    from decoder.backends.native.library import cache_folder

    if (kept := cache_folder()) is None:
        return own(folder, prefix="models")
    files = sorted(os.path.join(at, one) for at, _, names in os.walk(folder) for one in names if one.endswith(".py"))
    file = kept / "transformers" / f"{digest([sys.version.encode(), *map(state, files)])[:32]}.json"
    if (found := read_kept(file)) is None:
        made = own(folder, prefix="models")
        keep(file, [[sorted(needs), {name: sorted(of) for name, of in names.items()}] for needs, names in made.items()])
        return made
    return {frozenset(needs): {name: set(of) for name, of in names.items()} for needs, names in found}
