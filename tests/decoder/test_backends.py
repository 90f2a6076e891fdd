"""A backend is compared with the reference before it is used: whatever fails is told once, and the text stays right."""

import warnings
from functools import partial

import pytest
import torch

import decoder.__main__ as command
from decoder import Decoder
from decoder.admission import Admission, CacheBytes
from decoder.arguments import check_arguments
from decoder.backends import check, choose, norms
from decoder.backends.base import AttentionShape
from decoder.backends.cuda import backend, kernel_check, rotary, split_kv
from decoder.backends.cuda.cuda_graphs import CUDA
from decoder.backends.native import library as native
from decoder.backends.native import native_attention, packed_linear, packed_weight, whole_model
from decoder.backends.native.backend import NATIVE
from decoder.backends.reference.backend import Reference
from decoder.request import GenerationRequest
from decoder.sampling.native_choice import NativeChoice
from decoder.sequence import Sequence

from ..tiny import byte_tokenizer
from .conftest import all_heads, tiny_llama
from .tape import TapeRecorder
from .test_graphs import NARROW, SAMPLING


class UnknownToPython(Exception):
    """Compilers have exceptions of their own."""


ERRORS = [RuntimeError, KeyError, AssertionError, OSError, UnknownToPython, NotImplementedError]


def wrong(function):
    """Right by shape and dtype."""

    def changed(*args, **kwargs):
        result = function(*args, **kwargs)
        return tuple(x * 1.5 for x in result) if isinstance(result, tuple) else result * 1.5

    return changed


def no_number(function):
    def changed(*args, **kwargs):
        result = function(*args, **kwargs)
        return tuple(x * torch.nan for x in result) if isinstance(result, tuple) else result * torch.nan

    return changed


def raising(error):
    def replaced(_):
        def raises(*args, **kwargs):
            raise error("the reason\nand more of it")

        return raises

    return replaced


FAULTS = {"wrong": wrong, "no number": no_number} | {error.__name__: raising(error) for error in ERRORS}


def some(known, *named):
    """All of ``known``; those that are not named are slow: errors of all types are caught in one place."""
    return [one if one in named else pytest.param(one, marks=pytest.mark.slow) for one in known]


# Attention meets them all.
SOME_FAULTS = some(FAULTS, "wrong", "no number", "KeyError", "UnknownToPython")
SOME_ERRORS = some(ERRORS, KeyError, UnknownToPython)


@pytest.fixture
def on_cuda(as_on_cuda, monkeypatch):
    """Decoders choose as on CUDA, with stand-ins for the kernels and the recorder; gives the recorders."""
    recorders = []

    def recorder(device):
        recorders.append(TapeRecorder())
        return recorders[-1]

    monkeypatch.setattr(choose, "on_cuda", lambda device: True)
    monkeypatch.setattr(split_kv, "unavailable", lambda device: None)
    monkeypatch.setattr(backend, "CudaGraphs", recorder)
    return recorders


def single(**settings):
    return tiny_llama(torch.float32, **settings)


def told(make):
    """What ``make`` gives, and the warnings of ours meanwhile."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = make()
    return result, [str(one.message) for one in found if "left off" in str(one.message)]


def state(dec):
    return {path.name: path.on for path in dec.target.findings()}


def text(dec, prompt, method="ar", length=12):
    return dec.generate(prompt, length, method, SAMPLING, NARROW).token_ids


@pytest.fixture(scope="module")
def expected(prompt):
    """By a decoder of CPU layers, in float64's company: the same weights."""
    return text(Decoder(single()), prompt)


def assert_left_off(make, prompt, expected, name, fault):
    dec, found = told(lambda: Decoder(make()))
    again, more = told(lambda: [text(dec, prompt) for _ in range(2)])
    third, even_more = told(lambda: text(Decoder(make()), prompt))
    assert again == [expected] * 2 and third == expected
    warned = found + more
    assert len(warned) == 1 and not even_more, warned
    assert warned[0].startswith(f"{name} left off on cpu: ")
    assert "report this in an issue" in warned[0] and "python -m decoder doctor" in warned[0]
    if fault not in ("wrong", "no number"):
        assert f"{fault}: " in warned[0] and "the reason" in warned[0]
        # What a KeyError says is on one line as it is.
        assert fault == "KeyError" or "more of it" not in warned[0]
    assert state(dec)[name] is False and isinstance(dec.target.backend, Reference)
    [line] = [line for line in dec.report().splitlines() if line.strip().startswith(name)]
    assert " off " in line and warned[0].split(": ", 1)[1][:15] in line
    assert not dec.bitwise
    with pytest.raises(ValueError, match="bitwise cannot be had here"):
        Decoder(make(), bitwise=True)
    return dec


def test_all_is_on_where_all_works(on_cuda, prompt, expected):
    dec, found = told(lambda: Decoder(single()))
    assert not found
    # What the test recorded was replayed in it, and nothing of it is kept.
    assert on_cuda[0].replayed >= 4 and not dec.target.pool.nbytes
    assert text(dec, prompt) == expected
    assert state(dec)[CUDA] and dec.target.backend.rotary
    # A second decoder of such a model has a recorder of its own.
    other = Decoder(single(seed=1))
    assert len(on_cuda) == 2 and other.target.backend.recorder is on_cuda[1]


@pytest.mark.parametrize("fault", FAULTS)
def test_attention_of_a_device_that_fails_leaves_all_to_the_reference(on_cuda, prompt, expected, monkeypatch, fault):
    monkeypatch.setattr(split_kv, "split_kv_attention", FAULTS[fault](split_kv.split_kv_attention))
    assert_left_off(single, prompt, expected, CUDA, fault)


@pytest.mark.parametrize("fault", SOME_FAULTS)
def test_a_rotation_that_is_another_function_is_not_used(on_cuda, prompt, expected, monkeypatch, fault):
    monkeypatch.setattr(rotary, "rotate", FAULTS[fault](rotary.rotate))
    dec, found = told(lambda: Decoder(single()))
    assert not found and not dec.target.backend.rotary and state(dec)[CUDA]
    assert text(dec, prompt) == expected and dec.target.backend.recorder.replayed > 5


@pytest.mark.parametrize("fault", SOME_FAULTS)
def test_norms_that_are_another_function_are_not_used(with_native, prompt, expected, monkeypatch, fault):
    """On a CPU as well, and for real but for the fault."""
    monkeypatch.setattr(norms.FusedNorm, "__call__", FAULTS[fault](norms.FusedNorm.__call__))
    dec, found = told(lambda: Decoder(single()))
    assert not found and dec.target.norm not in dec.target.backend.called
    assert text(dec, prompt) == expected


def test_a_token_whose_embedding_is_zero_is_no_fault(with_native, prompt, monkeypatch):
    """As padding's is in some models: its keys and values are zero, and no share of their norm can be off."""
    model = single()
    with torch.no_grad():
        model.model.embed_tokens.weight[check.trial_tree(model.config.vocab_size).tokens[2]] = 0
    dec, found = told(lambda: Decoder(model))
    assert not found and state(dec)[NATIVE]
    monkeypatch.setattr(whole_model.WholeModel, "run", FAULTS["wrong"](whole_model.WholeModel.run))
    dec, found = told(lambda: Decoder(model))
    assert not state(dec)[NATIVE]


OF_LIBRARY = {
    "products": (packed_weight.NativeWeight, "__call__"),
    "layers": (whole_model.WholeModel, "run"),
    "attention": (native_attention, "native_attention"),
    "packing": (packed_linear, "pack"),
}


@pytest.mark.parametrize("fault", SOME_FAULTS)
@pytest.mark.parametrize("part", OF_LIBRARY)
def test_what_fails_of_the_library_leaves_all_to_the_reference(with_native, prompt, expected, monkeypatch, fault, part):
    owner, name = OF_LIBRARY[part]
    right = getattr(owner, name)
    make = single
    if part == "attention":

        def make():
            """Whose layers are called one by one."""
            model = single()
            model.model.layers[0].register_forward_hook(lambda module, args, output: None)
            return model

    if part == "packing" and fault in ("wrong", "no number"):
        factor = 1.5 if fault == "wrong" else torch.nan
        monkeypatch.setattr(
            owner, name, lambda given, *other, **named: right([w * factor for w in given], *other, **named)
        )
    elif part == "layers" and fault in ("wrong", "no number"):
        factor = 1.5 if fault == "wrong" else torch.nan
        monkeypatch.setattr(
            owner,
            name,
            lambda *given: (found := right(*given))._replace(hidden=torch.roll(found.hidden, 1, -1) * factor),
        )
    else:
        monkeypatch.setattr(owner, name, FAULTS[fault](right))
    assert_left_off(make, prompt, expected, NATIVE, fault)


def test_a_token_that_the_library_chooses_otherwise_leaves_all_to_the_reference(
    with_native, prompt, expected, monkeypatch
):
    right = NativeChoice.highest

    def another(*given):
        token, score = right(*given)
        return (token + 1) % 48, score

    monkeypatch.setattr(NativeChoice, "highest", another)
    dec = assert_left_off(single, prompt, expected, NATIVE, "wrong")
    assert "has the highest score" in dec.report()


def test_without_memory_for_packed_weights_the_reference_decodes(with_native, prompt, expected, monkeypatch):
    monkeypatch.setattr(packed_linear, "available_memory", lambda device: 0)
    dec, found = told(lambda: Decoder(single()))
    assert not found and not dec.bitwise and text(dec, prompt) == expected
    assert "there is no memory for a packed copy of the weights" in dec.report()


def test_a_recording_that_replays_something_else_is_left_off(on_cuda, prompt, expected, monkeypatch):
    class Stale(TapeRecorder):
        """Replays nothing: its outputs are those of the first time."""

        def record(self, run):
            outputs = run()
            return (lambda: None), outputs

    monkeypatch.setattr(backend, "CudaGraphs", lambda device: Stale())
    assert_left_off(single, prompt, expected, CUDA, "wrong")


@pytest.mark.parametrize("error", SOME_ERRORS)
@pytest.mark.parametrize("where", ["__init__", "record", "warm_up"])
def test_a_recorder_that_raises_anything_is_left_off(on_cuda, prompt, expected, monkeypatch, error, where):
    class Breaking(TapeRecorder):
        pass

    def breaks(*_):
        raise error("the reason\nand more of it")

    setattr(Breaking, where, breaks)
    monkeypatch.setattr(backend, "CudaGraphs", lambda device: Breaking())
    assert_left_off(single, prompt, expected, CUDA, error.__name__)


@pytest.mark.parametrize("error", [KeyError, UnknownToPython])
def test_a_recording_that_fails_later_is_told_and_reported(on_cuda, prompt, expected, monkeypatch, error):
    dec = Decoder(single())
    monkeypatch.setattr(dec.target.backend.recorder, "record", raising(error)(None))
    tokens, found = told(lambda: [text(dec, prompt) for _ in range(2)])
    assert tokens == [expected] * 2
    assert len(found) == 1 and found[0].startswith(f"{CUDA} left off on cpu: {error.__name__}: ")
    assert "passes run unrecorded" in dec.report() and error.__name__ in dec.report()


def test_memory_that_runs_out_in_a_test_is_no_fault(on_cuda, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(split_kv, "split_kv_attention", full)
    with pytest.raises(torch.OutOfMemoryError):
        Decoder(single())


def test_the_real_kernels_pass_their_tests(monkeypatch):
    """Emulated on a CPU, at small sizes."""
    pytest.importorskip("triton", reason="Triton is built for Linux only")
    from .triton_emulation import repair_emulation

    repair_emulation()
    monkeypatch.setattr(kernel_check, "_PASSES", ((1, False), (5, True)))
    monkeypatch.setattr(kernel_check, "_LENGTHS", (0, 70))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        shape = AttentionShape(4, 2, 16, 24, dtype)
        assert kernel_check.split_kv_fault(shape, device) is None


@pytest.mark.parametrize("change", [lambda x: x + 0.2, lambda x: x[..., :-1], lambda x: x.clone().fill_(torch.nan)])
def test_differences_are_found_and_roundings_are_none(change):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert check.difference(x.bfloat16(), x, 2**-6) is None
    assert "its numbers differ" in (fault := check.difference(change(x), x, 2**-6)) or "shape" in fault


def test_a_report_has_versions_device_and_what_runs_each_model(model):
    dec = Decoder(single(), heads=all_heads(model), draft_model=single(seed=2, num_hidden_layers=1))
    report = dec.report()
    assert f"torch {torch.__version__}" in report and "transformers " in report and "triton" in report
    assert "device: cpu" in report and "float32" in report
    ours = f"{native.instruction_set()} by the native library, " if native.available() else ""
    assert f"\ninstructions: {ours}{torch.backends.cpu.get_cpu_capability()} by PyTorch\n" in report
    assert report.count(f"  {NATIVE}") == report.count("texts in one pass") == report.count("bit for bit") == 2
    assert "draft heads: chained" in report


def test_doctor_prints_the_report_and_refuses_in_a_sentence(tmp_path, capsys):
    single(vocab_size=256).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()
    assert command.main(["doctor", "--model", str(tmp_path), "--device", "cpu", "--dtype", "bfloat16"]) == 0
    out, err = capsys.readouterr()
    assert "llama in bfloat16" in out and f"{NATIVE} " in out and not err
    assert command.main(["doctor", "--model", str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and "Traceback" not in err
    with pytest.raises(SystemExit) as ended:
        command.main(["doctor"])
    assert ended.value.code == 2


def test_a_preempted_text_leaves_its_buffers_to_nobody(on_cuda, monkeypatch):
    """What it had is free for those that run on, and it takes more only once there is room for what it then had."""
    dec = Decoder(single(max_position_embeddings=8000), bitwise=False)
    preempt, kept = Sequence.preempt, []
    admission = Admission(4, CacheBytes(int(dec.target.kv_bytes * 4100 / 0.6) + 1))
    engine = dec.engine(admission)
    monkeypatch.setattr(Sequence, "preempt", lambda sequence: (preempt(sequence), kept.append(None)))
    sequences = []
    for tokens, new in ((100, 60), (1300, None)):
        one = check_arguments(dec, GenerationRequest([1] * tokens, new, "ar", None, ignore_eos=True))
        sequences.append(dec.sequence(engine, one))
        admission.plan(sequences[-1], partial(dec.cache_bytes, one))
        engine.add(sequences[-1])
    while not sequences[0].done:
        engine.step()
        if kept == [None]:
            kept.append(dec.target.pool.nbytes)
    assert kept == [None, 0]
