from pathlib import Path

import pytest
from tiny_books import make_books, make_model, short_run


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def books(tmp_path_factory) -> Path:
    return make_books(tmp_path_factory.mktemp("data") / "books")


@pytest.fixture
def flags(model, books, tmp_path) -> list[str]:
    """Everything a short run on the tiny model needs but the subcommand; results land in ``tmp_path/out``."""
    return short_run(model, books, tmp_path)
