"""Tiny random models: small enough for float64, sharp enough that drafts are right often."""

import io
import itertools
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import decoder.__main__ as command
from decoder import Decoder, DraftHeads, SamplingParams
from decoder.backends import faults, kept_tests
from decoder.backends.cuda import attention_check, bitwise_split_kv, kernel_check, rotary, split_kv
from decoder.backends.cuda.backend import CudaBackend
from decoder.backends.native import library as native
from decoder.cache.base import LayeredCache
from decoder.drafters.levels import LevelsWanted, fill_together
from decoder.drafters.tuning.level_policy import LevelPolicy
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.eagle3.config import Eagle3Config
from decoder.eagle3.draft_model import Eagle3DraftModel
from decoder.model import target
from decoder.model.options import layer_configs
from decoder.sequence import Sequence

from ..tiny import SIZES
from .tape import eager_attention, eager_attention_by_position, eager_rotation

VOCAB = 48


def tiny_llama(dtype=torch.float64, seed=0, **overrides):
    torch.manual_seed(seed)
    settings = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 4096, **overrides}
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model


def random_heads(model, num_heads=3, kind="chained", seed=1):
    torch.manual_seed(seed)
    if kind == "eagle3":
        heads = new_heads(model.config, num_heads)
        for parameter in heads.parameters():
            parameter.data.mul_(3)
        return heads
    heads = DraftHeads(model.config.hidden_size, num_heads=num_heads, kind=kind)
    for parameter in heads.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    return heads


def new_heads(config, levels):
    """An EAGLE-3 draft model of the shape of a model's layer, with the draft vocabulary of every second token."""
    inner = config.intermediate_size  # some have a size for each layer
    first = layer_configs(config)[0]
    shape = Eagle3Config(
        target_hidden_size=config.hidden_size,
        hidden_size=config.hidden_size,
        intermediate_size=inner if isinstance(inner, int) else inner[0],
        attention_heads=config.num_attention_heads,
        kv_heads=first.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        target_layers=None,
        sliding_window=24,
        levels=levels,
    )
    return Eagle3DraftModel(shape, torch.arange(0, config.vocab_size, 2))


def some(cases, often):
    """Parameters of a sweep: names, or tuples of values. Those that are not in ``often`` repeat these, and are slow."""
    marked = ((case, () if case in often else pytest.mark.slow) for case in cases)
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case, marks in marked]


def all_heads(model, kind="chained", num_heads=3):
    """Linear heads of a kind, and a draft model for the methods that need one."""
    return {each: random_heads(model, num_heads, each) for each in (kind, "eagle3")}


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch):
    """Tests replace functions, which a kept outcome of the tests at load does not tell."""
    monkeypatch.setattr(kept_tests, "note", lambda *given: None)


@pytest.fixture(scope="session")
def model():
    return tiny_llama()


@pytest.fixture(scope="session")
def dec(model):
    small = tiny_llama(seed=2, num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    return Decoder(model, heads=all_heads(model), draft_model=small)


@pytest.fixture(autouse=True)
def untested(monkeypatch):
    """Of a stand-in that has failed the next test's user has not been told."""
    monkeypatch.setattr(faults, "_warned", set())


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command in this process: (exit status, standard output, standard error)."""

    def run(*arguments, typed=None):
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        try:
            status = command.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def without_native(monkeypatch):
    """A machine without a C compiler, where PyTorch's own operators do all."""
    monkeypatch.setattr(native, "_loaded", lambda: "no C compiler (cc or gcc) is installed")


@pytest.fixture
def with_native():
    if not native.available():
        pytest.skip("there is no C compiler here")


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Kernels have their stand-ins, the walk and each choice are the device's, and what was never written is no
    number."""
    monkeypatch.setattr(target.Target, "draws_whole_trees", True)
    for module in ("sampler", "host_rows"):
        monkeypatch.setattr(f"decoder.sampling.{module}.on_host", lambda tensor: False)
    monkeypatch.setattr(split_kv, "split_kv_attention", eager_attention)
    monkeypatch.setattr(kernel_check, "_PASSES", ((1, False), (5, True)))
    monkeypatch.setattr(kernel_check, "_LENGTHS", (0, 70))
    monkeypatch.setattr(bitwise_split_kv, "bitwise_split_kv_attention", eager_attention_by_position)
    monkeypatch.setattr(attention_check, "_LENGTHS", (1, 97, 300))
    monkeypatch.setattr(rotary, "rotate", eager_rotation)
    buffer = LayeredCache._buffer
    monkeypatch.setattr(LayeredCache, "_buffer", lambda *args: buffer(*args).fill_(float("nan")))


def with_recorder(dec, recorder):
    """Let a decoder run its passes as on CUDA."""
    for each in filter(None, (dec.target, dec.draft_target)):
        each.use(CudaBackend(each, recorder))
    return dec


def random_tokens(count, seed, vocabulary=VOCAB):
    """A text of random tokens."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def prompt():
    return random_tokens(40, 7)


def transformers_text(model, prompt, new, **settings):
    """The new tokens of transformers' own greedy text."""
    ids = torch.tensor([prompt])
    given = dict(do_sample=False, max_new_tokens=new, pad_token_id=0, **settings)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, len(prompt) :].tolist()


def assert_preempted_as_alone(dec, room, options, monkeypatch):
    """Of three texts that go to the model's last position one waits again, and each is the one that it is alone.

    There are ``room`` bytes for caches, enough for all of them to begin and for two of them at their end.
    """
    texts, params = [list(range(count)) for count in (20, 24, 28)], [SamplingParams(seed=seed) for seed in range(3)]
    whole = [dec.generate(text, None, "ar", own).token_ids for text, own in zip(texts, params, strict=True)]
    found, preempt = [], Sequence.preempt
    monkeypatch.setattr(Sequence, "preempt", lambda sequence: (found.append(sequence), preempt(sequence)))
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    monkeypatch.setattr("decoder.admission.available_memory", lambda device: room / 0.6)
    outs = dec.generate_batch(texts, None, "medusa", params, options)
    assert [out.token_ids for out in outs] == whole
    assert found


def finding(result):
    """Work that is done at once, with this result."""

    def work(*given):
        return result
        yield

    return work


def clocked(monkeypatch, node_seconds):
    """Times of the test's own: 1 for a verification and ``node_seconds`` more for each node.

    What methods that follow the clock draft, and so how many steps they take, is then the same on every machine.
    """
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) * 1e-9)
    table = [0.0, *(1.0 + node_seconds * node for node in range(64))]
    monkeypatch.setattr(VerifyCosts, "_measure", finding(table))
    monkeypatch.setattr(LevelPolicy, "overhead", lambda policy, levels: 0.0)


def drafted_levels(heads, state, sampler, count, own_level=False):
    """The levels that a step would draft from ``state``, of one text."""
    found = []
    wanted = LevelsWanted(heads, state, sampler, count, own_level, lambda levels, seconds: found.append(levels))
    fill_together([wanted])
    return found[0]


def tensors_damaged(change):
    """What changes the tensors of a checkpoint's folder."""

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def config_damaged(**changes):
    """What changes the configuration of a checkpoint's folder, and takes away its tensors, which are not looked at."""

    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        (folder / "model.safetensors").unlink()

    return damage


def take(rule, tree, logits, sampler, ends=lambda token: False):
    """Path and tokens of a walk by a rule of acceptance, followed as the engine does."""
    path, tokens = [], []
    for node, drawn in rule(tree, logits, sampler):
        path.append(node)
        tokens.append(sampler.take(drawn))
        if ends(tokens[-1]):
            break
    return path, tokens
