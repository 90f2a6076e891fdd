"""Memory that is freed while a model is loaded goes back to the system."""

import subprocess
import sys

import pytest
import torch

from decoder import allocating
from decoder.__main__ import main

from .conftest import tiny_llama

# In a process of its own, since in this one others may have left free memory, which would be used.
FREEING = """
from pathlib import Path
import torch
from decoder import allocating

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

allocating.give_back()
before = held()
pieces = [torch.ones(1 << 20) for _ in range(16)]
assert held() - before > 15 << 22, held() - before
# What stands behind them would hold the memory of all.
last = torch.ones(1 << 10)
del pieces
assert held() - before < 8 << 20 and last.all(), held() - before
allocating.keep()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_what_is_freed_goes_back_until_it_is_to_be_kept():
    done = subprocess.run([sys.executable, "-c", FREEING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("system", ["another", "without glibc"])
def test_elsewhere_nothing_is_set(system, monkeypatch):
    if system == "another":
        monkeypatch.setattr(allocating.sys, "platform", "darwin")
    monkeypatch.setattr(allocating.ctypes, "CDLL", lambda name: object())
    allocating.give_back()
    allocating.keep()


def test_the_command_gives_back_until_its_model_is_there(monkeypatch, tmp_path, capsys):
    tiny_llama(torch.float32).save_pretrained(tmp_path)
    done = []
    monkeypatch.setattr("decoder.__main__.give_back", lambda: done.append("gives back"))
    monkeypatch.setattr("decoder.cli.flags.keep", lambda: done.append("keeps"))
    monkeypatch.setattr("decoder.loader.load", lambda *given, **named: done.append("loads"))
    with pytest.raises(AttributeError):
        main(["doctor", "--model", str(tmp_path)])
    assert done == ["gives back", "loads", "keeps"]
