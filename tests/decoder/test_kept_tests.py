"""The tests at load: when their outcome is relied on, and what has them run again."""

import json
import os
import shutil
import sys
import time
import types
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import decoder
from decoder.__main__ import main
from decoder.backends import bitwise_check, choose, kept, kept_tests
from decoder.backends.kept_tests import note
from decoder.backends.native import library as native

from .conftest import tiny_llama
from .test_gguf import hf_model, write_gguf  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("with_native")
BOTH = ["passes", "bits"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where outcomes are kept, for a program in which nothing else is replaced."""
    monkeypatch.setattr(kept_tests, "note", note)
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "tests"


@pytest.fixture
def file(hf_model, tmp_path):  # noqa: F811
    path = tmp_path / "a.gguf"
    write_gguf(path, hf_model, gguf.GGMLQuantizationType.Q8_0)
    return path


@pytest.fixture
def run(monkeypatch):
    """Which tests have run."""
    done, passes, bits = [], choose.backend_fault, bitwise_check.model_fault
    monkeypatch.setattr(choose, "backend_fault", lambda *given: (done.append("passes"), passes(*given))[1])
    monkeypatch.setattr(bitwise_check, "model_fault", lambda *given: (done.append("bits"), bits(*given))[1])
    return done


def of(run):
    """Which tests have run since the last call."""
    done = list(run)
    run.clear()
    return done


def told(dec):
    """What the report tells of them."""
    return [line.partition("on   ")[2] for line in dec.report().splitlines() if "tests at load" in line]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_load_that_would_repeat_them_relies_on_the_last_one_and_gives_the_same_text(
    kind, file, folder, run, tmp_path
):
    source = file
    if kind == "folder":
        source = tmp_path / "model"
        tiny_llama(torch.float32).save_pretrained(source)
    load = decoder.load if kind == "file" else load_without_tokenizer
    first = load(source, tests="kept")
    assert of(run) == BOTH and [line[:28] for line in told(first)] == ["passed now; the next load re"]
    second = load(source, tests="kept")
    assert of(run) == [] and second.bitwise and told(second)[0].startswith(f"passed on {time.strftime('%d %B %Y')}")
    texts = [dec.generate([1, 2, 3], 12, ignore_eos=True, return_logprobs=True) for dec in (first, second)]
    assert texts[0].token_ids == texts[1].token_ids and texts[0].logprobs == texts[1].logprobs
    assert second.target.asked == first.target.asked
    assert second.target.layout.members == first.target.layout.members
    assert second.target.logit_scale == first.target.logit_scale
    assert second.target.attention_shapes == first.target.attention_shapes
    # Others, and those who ask for it, have them run.
    assert not told(load(source)) and of(run) == BOTH
    assert told(load(source, tests="anew")) and of(run) == BOTH


def load_without_tokenizer(source, **named):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    return decoder.load(source, tokenizer=tokenizer, **named)


def other_bytes(file: Path) -> None:
    """Another number in the file, at the same time as before."""
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def another_file(file: Path) -> None:
    """The same numbers and the same time in another file."""
    before, copy = file.stat(), file.with_suffix(".copy")
    copy.write_bytes(file.read_bytes())
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(file)


def later(patch: pytest.MonkeyPatch, seconds: int) -> None:
    now = time.time() + seconds
    patch.setattr(kept_tests.time, "time", lambda: now)


CHANGES = {
    "numbers": lambda file, patch: other_bytes(file),
    "time": lambda file, patch: os.utime(file, ns=(1, 1)),
    "another file": lambda file, patch: another_file(file),
    "code": lambda file, patch: patch.setattr(kept_tests, "_PACKAGE", Path(kept_tests.__file__).parent),
    "packages": lambda file, patch: patch.setattr(kept_tests, "version", lambda name: "9.9"),
    "processor": lambda file, patch: patch.setattr(kept_tests, "_processor", lambda: {"flags": "avx2"}),
    "instructions": lambda file, patch: patch.setattr(native, "library_name", lambda: "another"),
    "imported": lambda file, patch: patch.setattr(kept_tests, "_tells", lambda name: name == "json"),
    "environment": lambda file, patch: patch.setenv("MKL_CBWR", "AVX2"),
    "threads": lambda file, patch: patch.setattr(torch, "get_num_threads", lambda: 3),
    "days": lambda file, patch: later(patch, 31 * 86400),
    "a clock set back": lambda file, patch: later(patch, -60),
    "unreadable": lambda file, patch: patch.setattr(kept_tests, "state", lambda file: os.stat("/nowhere")),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_they_run_again_where_something_has_changed_that_they_depend_on(change, file, folder, run, monkeypatch):
    decoder.load(file, tests="kept")
    decoder.load(file, tests="kept")
    assert of(run) == BOTH
    CHANGES[change](file, monkeypatch)
    decoder.load(file, tests="kept")
    assert of(run) == BOTH


def test_a_module_whose_file_is_gone_keeps_nobody_from_relying_on_them(file, folder, run, monkeypatch, tmp_path):
    """As those that torch.compile writes into a folder of its own, imports, and may delete."""
    module = types.ModuleType("torch.made_for_the_process")
    module.__file__ = str(tmp_path / "gone.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    decoder.load(file, tests="kept")
    decoder.load(file, tests="kept")
    assert of(run) == BOTH


@pytest.fixture
def library_without_file(monkeypatch, tmp_path):
    """As the process that compiles it has it, and one whose user asks for another instruction set."""
    found = [native.cache_folder() / f"native-{native.library_name()}.so", *native._PACKAGE.glob("native-*.so")]
    [file, *_] = [file for file in found if file.exists()] or [pytest.skip("the library is not kept here")]
    gone = Path(shutil.copy(file, tmp_path))
    opened = native._opened(gone)
    gone.unlink()
    return opened


def test_a_library_whose_file_is_gone_keeps_nobody_from_relying_on_them(
    library_without_file, file, folder, run, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(native, "_loaded", lambda: library_without_file)
        decoder.load(file, tests="kept")
    decoder.load(file, tests="kept")
    assert of(run) == BOTH


@pytest.mark.parametrize("asked", [{"dtype": "float32"}, {"bitwise": True}, {"bitwise": False}])
def test_they_run_again_for_another_form_of_the_model(asked, file, folder, run):
    decoder.load(file, tests="kept")
    of(run)
    decoder.load(file, tests="kept", **asked)
    assert of(run) == (BOTH if asked.get("bitwise") is not False else BOTH[:1])


@pytest.mark.parametrize("damage", [
    b"", b"{", b"[]", b"null", b'{"passed": "now"}', b"\xff", b"[" * 100_000, "open", "other", "not a number"
])  # fmt: skip
def test_of_a_damaged_file_nothing_is_believed(damage, file, folder, run):
    decoder.load(file, tests="kept")
    of(run)
    [kept] = folder.iterdir()
    content = json.loads(kept.read_bytes())
    if damage == "open":
        kept.chmod(0o666)
    elif damage == "other":
        content["circumstances"]["threads"] += 1
        kept.write_text(json.dumps(content))
    elif damage == "not a number":
        kept.write_text(json.dumps(content | {"passed": float("nan")}))
    else:
        kept.write_bytes(damage)
    decoder.load(file, tests="kept")
    assert of(run) == BOTH
    decoder.load(file, tests="kept")
    assert of(run) == []


def test_a_folder_that_others_can_write_to_is_not_used(file, folder, run):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    for _ in range(2):
        decoder.load(file, tests="kept")
        assert of(run) == BOTH
    assert not list(folder.iterdir())


@pytest.mark.parametrize("part", BOTH)
def test_nothing_is_kept_of_tests_that_fail(part, file, folder, monkeypatch):
    where, name = (choose, "backend_fault") if part == "passes" else (bitwise_check, "model_fault")
    own = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *given: "it gives other numbers")
    monkeypatch.setattr("decoder.backends.faults._warned", set())
    if part == "passes":
        with pytest.warns(UserWarning, match="it gives other numbers"):
            assert not decoder.load(file, tests="kept").bitwise
    else:
        assert not decoder.load(file, tests="kept").bitwise
    assert not folder.exists()
    monkeypatch.setattr(where, name, own)
    assert decoder.load(file, tests="kept").bitwise and list(folder.iterdir())


def test_what_is_changed_behind_the_load_is_tested(file, folder, run):
    decoder.load(file, tests="kept")
    of(run)
    dec = decoder.load(file, tests="kept")
    assert of(run) == []
    decoder.Decoder(dec.model, dec.tokenizer)
    assert of(run) == BOTH[:1]  # that bits hold is known in this process
    dec.model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: output * 1.5)
    dec.generate([1, 2, 3], 4, ignore_eos=True)
    assert of(run) == BOTH


def test_old_outcomes_go(file, folder, monkeypatch):
    monkeypatch.setattr(kept, "_MOST_FILES", 2)
    for number in range(4):
        monkeypatch.setenv("OMP_NOTHING", str(number))
        decoder.load(file, tests="kept")
    assert len(list(folder.iterdir())) == 2


def test_the_command_relies_on_them_and_doctor_runs_them(file, folder, run, capsys):
    flags = ["--model", str(file), "--prompt", "he", "--max-new-tokens", "2"]
    assert main(["doctor", "--model", str(file)]) == 0
    assert "tests at load            on   passed now; the next load relies on it, by" in capsys.readouterr().out
    assert of(run) == BOTH
    assert main(["run", *flags]) == 0 and of(run) == []
    assert main(["run", *flags, "--tests", "always"]) == 0 and of(run) == BOTH
    assert main(["doctor", "--model", str(file)]) == 0 and of(run) == BOTH


def test_an_unknown_word_is_refused(file):
    with pytest.raises(ValueError, match=r"unknown tests 'keep'.*use one of always, kept, anew"):
        decoder.load(file, tests="keep")
