from pathlib import Path

import pytest
from tiny_books import make_books, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def books(tmp_path_factory) -> Path:
    return make_books(tmp_path_factory.mktemp("data") / "books")


@pytest.fixture
def flags(model, books, tmp_path) -> list[str]:
    """Everything a short run on the tiny model needs but the subcommand; results land in ``tmp_path/out``."""
    settings = {
        "model.model_name_or_path": model,
        "model.learning_rate": 1e-2,
        "model.warmup_steps": 2,
        "data.source": books,
        "data.chunk_tokens": 32,
        "data.chunks_per_book": 2,
        "data.batch_size": 4,
        "data.cache_dir": tmp_path / "cache",
        "output": tmp_path / "out",
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 12,
        "trainer.log_every_n_steps": 1,
        "trainer.val_check_interval": 6,
        "trainer.check_val_every_n_epoch": "null",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
    }
    return [f"--{name}={value}" for name, value in settings.items()]
