"""What the code of a model and of its configuration looks at: names of fields, and words such as kinds of layers."""

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel


class LookedAt(NamedTuple):
    """The names that code reads or calls, and the strings that stand in it; both without those of documentation."""

    names: frozenset[str]
    strings: frozenset[str]

    def at_any(self, fields: set[str]) -> bool:
        """Whether a field is read, be it by its name or by a string."""
        return not fields.isdisjoint(self.names | self.strings)


def looked_at(*classes: type) -> LookedAt:
    """What is looked at where classes of models, with their modules, or of configurations are defined."""
    modules = {sys.modules[one.__module__] for given in classes for one in given.__mro__ if _is_own(one)}
    codes = [code for module in modules for code in _codes(module)]
    # Some modules choose the class of a layer by a table.
    tables = [tuple(table) for module in modules for name, table in vars(module).items() if _is_table(name, table)]
    constants = [*tables, *(constant for code in codes for constant in code.co_consts)]
    return LookedAt(
        names=frozenset(name for code in codes for name in code.co_names),
        strings=frozenset(word for constant in constants for word in _strings(constant)),
    )


def _is_own(one: type) -> bool:
    """Whether a class is a model's or a configuration's, and not transformers' class for all."""
    return issubclass(one, PreTrainedModel | PreTrainedConfig) and one not in (PreTrainedModel, PreTrainedConfig)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of functions and methods that stand in a module's own file; not what dataclasses make of fields."""
    file = getattr(module, "__file__", None)
    found: list[Any] = list(vars(module).values())
    classes = [one for one in found if isinstance(one, type) and one.__module__ == module.__name__]
    for one in (*found, *(member for made in classes for member in vars(made).values())):
        function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is not None and code.co_filename == file:
            yield from _nested(code)


def _is_table(name: str, value: object) -> bool:
    return isinstance(value, dict) and not name.startswith("__")


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _strings(constant: object) -> Iterator[str]:
    for one in constant if isinstance(constant, tuple | frozenset) else (constant,):
        if isinstance(one, str):
            yield one
