"""What `decoder run` does before its first token, and what it leaves out."""

import json
import subprocess
import sys
import time
from contextlib import nullcontext

import gguf
import pytest
import torch

import decoder
import decoder.__main__ as command
from decoder.backends.native import library as native
from decoder.cli import importing
from decoder.cli.importing import import_transformers
from decoder.model import loading
from decoder.model.gguf import ahead, open_checked

from .test_gguf import hf_model, write_gguf  # noqa: F401 (a fixture)

# Slow to import, and needed by other commands, other models or other programs.
ELSEWHERE = (
    *("transformers.models.gemma3.modeling_gemma3", "transformers.models.qwen2.modeling_qwen2"),
    *("decoder.hf", "decoder.serve.app", "decoder.backends.cuda", "uvicorn", "starlette", "llguidance"),
    *("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton"),
    *("datasets", "lightning", "matplotlib", "pandas", "peft", "pyarrow", "scipy", "sklearn", "torchmetrics"),
)


@pytest.fixture(scope="module")
def file(hf_model, tmp_path_factory):  # noqa: F811
    path = tmp_path_factory.mktemp("model") / "a.gguf"
    write_gguf(path, hf_model, gguf.GGMLQuantizationType.Q8_0)
    return str(path)


def _told(code: str, *arguments: str) -> dict:
    """What a program prints as JSON in its last line."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


_RUN = """
import gc, json, sys
from decoder.__main__ import main
status = main(["run", "--model", sys.argv[1], "--chat", "he", "--max-new-tokens", "1"])
imported = [name for name in sys.argv[2:] if name in sys.modules]
searches = gc.get_stats()[2]["collections"]
"""
# In the same process, when the text is there.
_LEFT_OUT = """
missing = not {"torch._dynamo", "torch.distributed.tensor"} & sys.modules.keys()
import torch, transformers
from transformers import masking_utils
from transformers.utils import import_utils

models = transformers.models.__path__[0] + "/__init__.py"
read = type(transformers.models)("models", models, import_utils.define_import_structure(models))
ids = torch.arange(8)[None]
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
asked = dict(mask_function=lambda b, h, q, k: k <= q, use_vmap=True, allow_is_causal_skip=False)
mask = masking_utils.sdpa_mask(1, 8, 8, **asked)
print("\\n" + json.dumps(dict(
    status=status,
    imported=imported,
    searches=searches,
    missing=missing,
    models=set(read.__all__) == set(transformers.models.__all__),
    logits=bool(torch.allclose(model(ids).logits[:, :4], model(ids[:, :4]).logits, atol=1e-5)),
    mask=bool((mask == torch.ones(8, 8).tril().bool()).all()),
    index=type(masking_utils.TransformGetItemToIndex()).__module__,
    compiler=torch._dynamo.disable.__module__,
    alone=not torch.distributed.is_available() and not import_utils.is_torch_distributed_available(),
)))
"""
_OTHERWISE = """
import json
from decoder.cli import importing
importing._MODELLING = (*importing._MODELLING, "torch._dynamo.of_another_version")
importing.import_transformers()
import torch, transformers.masking_utils as masks
print(json.dumps(dict(usual=masks.TransformGetItemToIndex.__module__, alone=not torch.distributed.is_available())))
"""


@pytest.fixture(scope="module")
def told(file):
    """What a process tells that has run the command."""
    return _told(_RUN + _LEFT_OUT, file, *ELSEWHERE)


def test_nothing_is_imported_that_the_model_does_not_need_and_no_cycles_are_looked_for(told):
    assert (told["status"], told["imported"]) == (0, [])
    # Of all objects. While PyTorch and transformers are imported there would be half a dozen.
    assert told["searches"] <= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is left out beside a CUDA device")
def test_what_is_left_out_of_transformers_is_there_when_it_is_asked_for(told):
    of_run = ("status", "imported", "searches")
    assert {name: value for name, value in told.items() if name not in of_run} == dict(
        **dict.fromkeys(("missing", "models", "logits", "mask", "alone"), True),
        index="torch._dynamo._trace_wrapped_higher_order_op",
        compiler="torch._dynamo.decorators",
    )


def test_what_is_in_transformers_models_is_looked_for_once(tmp_path, monkeypatch):
    """By all processes, until a file changes."""
    (tmp_path / "models" / "one").mkdir(parents=True)
    file, looked = tmp_path / "models" / "one" / "modeling_one.py", []
    file.write_text("class One: ...")
    there = {
        frozenset(): {"models.one.modeling_one": {"One", "Two"}},
        frozenset({"torch", "timm"}): {"models.b": {"B"}},
    }
    monkeypatch.setattr("decoder.backends.native.library.cache_folder", lambda: tmp_path / "cache")

    def found():
        looked.clear()
        importing._models_in.cache_clear()
        assert importing._models_in(tmp_path / "models", lambda *given, **named: looked.append(named) or there) == there
        return len(looked)

    try:
        assert [found(), found()] == [1, 0]
        (kept,) = (tmp_path / "cache" / "transformers").iterdir()
        kept.write_text(kept.read_text()[:-9])  # cut short
        assert [found(), found()] == [1, 0]
        file.write_text("class Another: ...")
        assert [found(), found()] == [1, 0]
        for kept in (tmp_path / "cache" / "transformers").iterdir():
            kept.chmod(0o666)  # anybody could have written it
        assert found() == 1
    finally:
        importing._models_in.cache_clear()


def test_if_transformers_asks_for_more_it_is_imported_as_always():
    assert _told(_OTHERWISE) == dict(usual="torch._dynamo._trace_wrapped_higher_order_op", alone=False)


def test_where_transformers_is_imported_already_nothing_is_left_out():
    import_transformers()
    assert torch.distributed.is_available()


def test_the_tokenizer_is_read_once(file, monkeypatch, capsys):
    from decoder.__main__ import main

    read, own = [], loading.gguf_tokenizer
    monkeypatch.setattr(loading, "gguf_tokenizer", lambda opened: read.append(opened.path) or own(opened))
    assert main(["run", "--model", file, "--chat", "he", "--max-new-tokens", "1"]) == 0, capsys.readouterr().err
    assert len(read) == 1


def test_a_tokenizer_that_was_read_before_is_the_decoders(file):
    tokenizer = loading.read_tokenizer(file)
    assert decoder.load(file, tokenizer=tokenizer).tokenizer is tokenizer
    with pytest.raises(ValueError, match="the tokenizer must be one of transformers"):
        decoder.load(file, tokenizer="a")


@pytest.mark.skipif(not native.available(), reason="there is no C compiler here")
def test_matrices_that_were_packed_ahead_are_the_models(file):
    config = loading.read_config(file)
    with ahead.packing_ahead(file):
        opened = open_checked(file)
        packed = {name: future.result() for name, future in opened.packing.items()}
        model = loading.read_quantised(file, config, torch.float32)
        assert not opened.packing
    assert all("finite" in vars(matrix) for matrix in packed.values())
    # Rows of queries are in another order in files of this architecture.
    assert {"token_embd.weight", "blk.1.ffn_up.weight"} < packed.keys() and "blk.1.attn_q.weight" not in packed
    assert model.model.layers[1].mlp.up_proj.matrix is packed["blk.1.ffn_up.weight"]
    plain = loading.read_quantised(file, config, torch.float32)
    assert plain.model.layers[1].mlp.up_proj.matrix is not packed["blk.1.ffn_up.weight"]
    for one, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not native.available(), reason="there is no C compiler here")
def test_a_block_that_ends_has_nothing_more_packed_and_its_error_is_told(file, monkeypatch):
    monkeypatch.setattr(ahead, "QuantisedMatrix", lambda *given, **named: time.sleep(0.1))
    with pytest.raises(FileNotFoundError, match="a prompt"), ahead.packing_ahead(file):
        futures = list(open_checked(file).packing.values())
        raise FileNotFoundError("there is no file with a prompt")
    assert futures[-1].cancelled() and not open_checked(file).packing


def test_of_a_file_that_cannot_be_read_nothing_is_told_ahead(file, tmp_path):
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    for source in ("nowhere.gguf", tmp_path / "b.gguf", tmp_path):
        done = False
        with ahead.packing_ahead(source):
            done = True
        assert done


@pytest.mark.parametrize(
    ("flags", "packs"),
    [
        (["run"], True),
        (["run", "--device", "cpu"], True),
        (["serve"], True),
        (["run", "--dtype", "float32"], False),  # for which weights are unpacked
        (["batch", "a", "b", "--ray", "auto"], False),  # whose processes load the model
    ],
)
def test_matrices_are_packed_ahead_where_they_stay_as_they_are(flags, packs, file, monkeypatch):
    begun = []
    monkeypatch.setattr(ahead, "packing_ahead", lambda source: begun.append(source) or nullcontext())
    args = command.PARSERS[flags[0]][0](command.Parser, "decoder").parse_args([*flags[1:], "--model", file])
    with command._ahead(args):
        assert begun == ([file] if packs else [])
