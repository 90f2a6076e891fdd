from pathlib import Path

import pytest
from tiny_books import make_books, make_model, short_run

from heads_train import callbacks, cli


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


@pytest.fixture(autouse=True)
def short_start(monkeypatch):
    """The parser has the subcommand that is asked for and no other: to make one takes as long as a little training."""
    start, subcommands = cli.run, cli.HeadsCLI.subcommands

    def run(arguments):
        known = subcommands()
        asked = {name: skip for name, skip in known.items() if name in arguments[:1]}
        with monkeypatch.context() as patch:
            patch.setattr(cli.HeadsCLI, "subcommands", staticmethod(lambda: asked or known))
            return start(arguments)

    monkeypatch.setattr(cli, "run", run)


@pytest.fixture
def drawn():
    """Loss curves are drawn as they are for users."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Loss curves, which take as long as a little training to draw, are left out except in tests that want them."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(callbacks.Figure, "savefig", lambda figure, path, **_: path.touch())
