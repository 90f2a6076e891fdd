"""What the packages need is what they say they need; where an extra is missing, one sentence names it."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import decoder
from decoder.model.loading import read_config
from decoder.parallel import sharding
from tests.installs import INSTALLS

from .conftest import tiny_llama
from .ranks import on_ranks

ROOT = Path(__file__).parents[2]
PACKAGES = {"decoder": "decoder", "heads-train": "heads_train", "eval": "ts_eval"}
# Triton comes with PyTorch where it can be had, and is looked for before it is used.
OPTIONAL = {"triton"}


def settings(folder):
    return tomllib.loads((ROOT / "packages" / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name):
    return re.split(r"[\[<>=~!; ]", name)[0].lower().replace("_", "-")


def imported(folder):
    """Names of the modules that a package's sources import, at their top or later."""
    found = set()
    for file in (ROOT / "packages" / folder / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - OPTIONAL


@pytest.mark.parametrize("folder", PACKAGES)
def test_all_that_is_imported_is_declared(folder):
    declared = settings(folder)
    extras = [name for names in declared.get("optional-dependencies", {}).values() for name in names]
    given = {normal(name) for name in [*declared["dependencies"], *extras, declared["name"]]}
    distributions = packages_distributions()
    for module in imported(folder):
        # Of what is not installed here, the name is taken for the distribution's.
        names = {normal(name) for name in distributions.get(module, [module])}
        own = {"decoder": "tokenswift-decoder", PACKAGES[folder]: declared["name"], "mauve": "mauve-text"}
        assert (names | {own.get(module)}) & given, f"{folder} imports {module} and does not declare it"


def test_each_package_and_each_extra_is_tried_by_itself():
    expected = set()
    for folder in PACKAGES:
        expected |= {folder} | {f"{folder}[{extra}]" for extra in settings(folder).get("optional-dependencies", {})}
    assert set(INSTALLS) == expected
    for install in INSTALLS.values():
        for pattern in install.tests:
            assert list((ROOT / "tests").glob(pattern)), pattern


def without_accelerate(rank, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "find_spec", lambda name: None)
        decoder.load(folder, device="cpu", tensor_parallel=True)


def test_tensor_parallelism_without_accelerate_names_the_extra(tmp_path):
    tiny_llama(vocab_size=48).save_pretrained(tmp_path)
    for error in on_ranks(2, without_accelerate, str(tmp_path)):
        assert isinstance(error, ValueError)
        assert str(error).endswith("not installed: pip install 'tokenswift-decoder[tensor-parallel]'")
    # One process needs nothing, and no plan for others does.
    sharding.refuse_without_accelerate(decoder.parallel.ranks.ALONE)
    sharding.refuse_unshareable(read_config(str(tmp_path)), 2)
