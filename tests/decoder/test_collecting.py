"""Python looks for cycles again behind a block in which it did not, however the block ends."""

import gc

import pytest

import decoder
from decoder.collecting import uncollected


@pytest.fixture(autouse=True)
def as_before():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("before", [True, False])
def test_a_block_leaves_it_as_it_was(before):
    (gc.enable if before else gc.disable)()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == before
    with pytest.raises(LookupError), uncollected():
        raise LookupError
    assert gc.isenabled() == before


def test_loading_puts_it_off_and_ends_with_it(monkeypatch, tmp_path):
    gc.enable()
    seen = []
    monkeypatch.setattr(
        "decoder.loader.join", lambda device: seen.append(gc.isenabled()) or (_ for _ in ()).throw(OSError)
    )
    with pytest.raises(OSError):
        decoder.load(tmp_path, tensor_parallel=True)
    assert seen == [False] and gc.isenabled()
