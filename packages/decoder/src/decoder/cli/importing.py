"""transformers, imported without what one process on a CPU does not use, in less than half the time.

Its modelling code imports PyTorch's compiler to mark some functions for it, and PyTorch's tensors over several
processes for models that processes share: a thousand modules, of 1.5 seconds and 90 MB.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_MODELLING = ("transformers.masking_utils", "transformers.modeling_utils")
_COMPILER = "torch._dynamo"
_WRAPPED = f"{_COMPILER}._trace_wrapped_higher_order_op"


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
    """Import the package of all models, which would read its two thousand files a second time, by what is known."""
    utils: Any = importlib.import_module("transformers.utils.import_utils")
    own = utils.define_import_structure
    folder = Path(utils.__file__).parent.parent / "models"

    def known(path: str, *given: Any, **named: Any) -> Any:
        if Path(path) != folder / "__init__.py" or given or named:
            return own(path, *given, **named)
        found = {
            needs: {name.removeprefix("models."): of for name, of in modules.items() if name.startswith("models.")}
            for needs, modules in own(folder, prefix="models").items()
        }
        return {needs: modules for needs, modules in found.items() if modules}

    utils.define_import_structure = known
    try:
        importlib.import_module("transformers.models")
    finally:
        utils.define_import_structure = own
