"""Several processes by Lightning's own flags: the same heads as one process with the whole batch."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.forked import forked
from tiny_books import short_run
from transformers import AutoModelForCausalLM

from decoder import DraftHeads
from heads_train.cli import main

SHARED = {"ddp": 1, "fsdp": 2}


def launch(*module: str) -> subprocess.CompletedProcess:
    """``torchrun`` a module with its arguments in two processes of one thread each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *torchrun, "-m", *module],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_same_heads(one: Path, two: Path) -> None:
    one, two = load_file(one / "heads.safetensors"), load_file(two / "heads.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=0, atol=1e-5), name


def fits(flags: list[str], folder: Path) -> dict[str, list[str]]:
    """The command of one process with a batch of four chunks, and per strategy of two processes with two each."""
    flags = ["fit", *flags, "--trainer.accumulate_grad_batches=2", "--trainer.max_steps=6"]
    both = [*flags, "--trainer.devices=2", "--data.batch_size=2", "--trainer.callbacks=probes.Shares"]
    commands = {"one": [*flags, f"--output={folder / 'one'}"]}
    for name in SHARED:
        (folder / f"held-{name}").mkdir()
        held = f"--trainer.callbacks.folder={folder / f'held-{name}'}"
        commands[name] = [*both, held, f"--trainer.strategy={name}", f"--output={folder / name}"]
    return commands


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def trained(request, model, books, tmp_path_factory) -> tuple[Path, str]:
    """A folder with the runs of one process, and of two by a strategy, which is told.

    This process is the first of the two, as torchrun would start it, and the other one is forked from it.
    """
    folder = tmp_path_factory.mktemp("scale")
    commands = fits(short_run(model, books, folder), folder)
    assert main(commands["one"]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    shared |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}
    flags = commands[request.param]
    with open(folder / "said", "wb") as said:
        second = forked(main, flags, stderr=said.fileno(), environment={**shared, "RANK": "1", "LOCAL_RANK": "1"})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**shared, "RANK": "0", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        try:
            assert main(flags) == 0
            second.join(60)
            assert second.exitcode == 0, (folder / "said").read_text()
        finally:
            second.kill()
            second.join()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    assert "Traceback" not in (folder / "said").read_text()
    return folder, request.param


@pytest.mark.filterwarnings("ignore:It is recommended to use")
def test_two_processes_train_the_heads_of_one_with_the_doubled_batch(trained, model):
    trained, strategy = trained
    assert_same_heads(trained / "one" / "last", trained / strategy / "last")
    trainings = [
        json.loads((trained / run / "last" / "config.json").read_text())["training"] for run in ("one", strategy)
    ]
    assert trainings[0]["chunks_per_step"] == trainings[1]["chunks_per_step"] == 8
    # The little books give one process and two the same chunks to measure on.
    assert trainings[0]["validation"] == pytest.approx(trainings[1]["validation"], abs=1e-5)
    # FSDP shards what is large: every process holds its share of the frozen layers and of the heads.
    whole = {
        "layers": sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).model.layers.parameters()),
        "heads": sum(p.numel() for p in DraftHeads.from_pretrained(trained / "one" / "last").parameters()),
    }
    for rank in range(2):
        held = json.loads((trained / f"held-{strategy}" / f"{rank}.json").read_text())
        assert held == {name: count // SHARED[strategy] for name, count in whole.items()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHARED)
def test_a_cut_run_of_two_processes_goes_on_with_two_or_one(flags, tmp_path, strategy):
    commands = fits(flags, tmp_path)
    assert main(commands["one"]) == 0
    command = ["heads_train", *commands[strategy], "--save_every=1"]
    done = launch(*command, "--trainer.callbacks+=probes.Cut", "--trainer.callbacks.step=4")
    assert done.returncode != 0 and "heads-train: power cut" in done.stderr
    saved = torch.load(tmp_path / strategy / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 4
    # A checkpoint holds the heads whole, and no share of the model, however it was trained.
    shapes = {f"heads.{name}": tensor.shape for name, tensor in DraftHeads(32).state_dict().items()}
    assert {name: tensor.shape for name, tensor in saved["state_dict"].items()} == shapes
    shutil.copytree(tmp_path / strategy, tmp_path / "alone")
    done = launch(*command)
    assert done.returncode == 0, done.stderr
    assert_same_heads(tmp_path / "one" / "last", tmp_path / strategy / "last")
    assert main([*commands["one"], f"--output={tmp_path / 'alone'}"]) == 0
    assert_same_heads(tmp_path / "one" / "last", tmp_path / "alone" / "last")
