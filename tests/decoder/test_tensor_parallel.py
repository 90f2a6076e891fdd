"""A model that processes share: the same text as in one process, with a share of weights and caches in each."""

import contextlib
import io
import itertools
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from decoder import Decoder, SamplingParams, TokenSwiftOptions, load
from decoder.__main__ import main
from decoder.cache.base import LayeredCache
from decoder.model.loading import read_model
from decoder.parallel import products, ranks
from decoder.parallel.ranks import TIMEOUT, ending_in_words, join, linked
from decoder.parallel.sharding import own_part, sharding, shared_parameters

from .conftest import random_heads
from .ranks import on_ranks

REFERENCE = Path(__file__).parents[2] / "data" / "reference-model"
CPU = torch.device("cpu")
FAMILIES = {
    "gqa": (LlamaConfig, LlamaForCausalLM, dict(num_key_value_heads=6)),
    "mha": (LlamaConfig, LlamaForCausalLM, dict(num_key_value_heads=12)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(num_key_value_heads=6, tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(num_key_value_heads=6, head_dim=8)),
}
SAMPLING = SamplingParams(temperature=0.8, min_p=0.02, repetition_penalty=1.2, penalty_window=16, seed=3)
FIXED = TokenSwiftOptions(tree=(2, 2, 1), ngrams=4, budget=24, sink=4)
RUNS = {
    "ar": ("ar", None),
    "tokenswift": ("tokenswift", FIXED),
    "tokenswift tuned": ("tokenswift", None),
    "medusa": ("medusa", FIXED),
    "eagle3": ("eagle3", None),
    "triforce": ("triforce", FIXED),
    "magicdec": ("magicdec", FIXED),
    "magicdec snapkv": ("magicdec", TokenSwiftOptions(tree=(1, 1), budget=24, sink=4, draft_cache="snapkv")),
    "prompt-lookup": ("prompt-lookup", None),
    "suffix": ("suffix", None),
    "tokenswift-fused": ("tokenswift-fused", FIXED),
    "auto": ("auto", None),
}


def tiny(family, folder=None, **overrides):
    """A random model whose 12 query heads 2 and 3 processes can share, saved to ``folder``; 50 tokens they cannot."""
    config, model_class, own = FAMILIES[family]
    settings = dict(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=12,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(4)
    model = model_class(config(**{**settings, **own, **overrides})).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def prompt_ids(length=40):
    return torch.randint(48, (length,), generator=torch.Generator().manual_seed(7)).tolist()


def decoder_of(model):
    small = tiny("gqa", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, hidden_size=16)
    kinds = ("gated", "chained", "eagle3")
    return Decoder(model, heads={kind: random_heads(model, 3, kind) for kind in kinds}, draft_model=small)


def shared_model(folder):
    return read_model(str(folder), CPU, dtype="float64", **sharding(join(CPU)))


def texts(dec, runs, tokens=16):
    """The tokens of each run, log-probabilities, most likely tokens, and two texts that are decoded together."""
    found = {}
    for name in runs:
        method, options = RUNS[name]
        out = dec.generate(prompt_ids(), tokens, method, SAMPLING, options, return_logprobs=True, top_logprobs=3)
        likely = [number for one in out.top_logprobs for entry in one for number in entry]
        found[name] = out.token_ids, [*out.logprobs, *likely], out.stats.steps
    prompts = [prompt_ids(), prompt_ids(9)]
    together = dec.generate_batch(prompts, [8, 6], "tokenswift", SAMPLING, FIXED)
    found["batch"] = [one.token_ids for one in together], [], 0
    return found


def rank_texts(rank, folder, runs):
    dec = decoder_of(shared_model(folder))
    return texts(dec, runs), dec.report()


def check_texts(folder, family, size, runs):
    expected = texts(decoder_of(tiny(family, folder)), runs)
    for found, report in on_ranks(size, rank_texts, folder, runs):
        for name in [*runs, "batch"]:
            assert found[name][0] == expected[name][0], name
            assert found[name][1] == pytest.approx(expected[name][1], abs=1e-9)
        assert "sums over processes" in report


@pytest.mark.parametrize(
    ("family", "size", "runs"),
    [("gqa", 2, ["tokenswift", "magicdec snapkv", "auto"]), ("qwen3", 3, ["triforce"])],
)
def test_processes_that_share_a_model_give_the_text_of_one(tmp_path, family, size, runs):
    check_texts(tmp_path, family, size, runs)


def rank_layers(rank, folder, style):
    model = shared_model(folder)
    own = {module: module.__dict__["forward"] for module in model.modules() if "forward" in module.__dict__}
    if style:
        make = products._STYLES[style]

        def wrong(*arguments):
            forward = make(*arguments)
            return lambda x: 2 * forward(x)

        products._STYLES[style] = wrong
    dec = Decoder(model)
    replaced = [name for name, module in model.named_modules() if module in dec.target.backend._forwards]
    tokens = dec.generate(prompt_ids(), 6, "ar", SAMPLING).token_ids
    assert own == {module: module.__dict__["forward"] for module in model.modules() if "forward" in module.__dict__}
    return replaced, tokens


@pytest.mark.parametrize("style", [None, "rowwise", "embedding_rowwise"])
def test_shared_layers_are_plain_products_unless_a_trial_shows_another_result(tmp_path, style):
    expected = Decoder(tiny("qwen2", tmp_path)).generate(prompt_ids(), 6, "ar", SAMPLING).token_ids
    names = {"rowwise": ("o_proj", "down_proj"), "embedding_rowwise": ("embed_tokens",)}
    for replaced, tokens in on_ranks(3, rank_layers, tmp_path, style):
        # Seven products in each of two layers, embedding and head.
        left = [name for name in replaced if name.endswith(names.get(style, ()))]
        assert not left and len(replaced) == {None: 16, "rowwise": 12, "embedding_rowwise": 15}[style]
        assert tokens == expected


def rank_disagrees(rank, folder):
    model = shared_model(folder)
    heads = {kind: random_heads(model, 3, kind, seed=rank) for kind in ("gated", "chained")}
    if rank:
        clock = itertools.count()
        time.perf_counter = lambda: next(clock) * 1e-2
    return texts(Decoder(model, heads=heads), ["tokenswift", "tokenswift tuned", "auto"], 24)


def test_a_process_whose_clock_and_heads_say_something_else_follows_the_first(tmp_path):
    """Heads of other weights stand for the roundings of another machine."""
    tiny("gqa", tmp_path)
    first, other = on_ranks(2, rank_disagrees, tmp_path)
    assert first == other


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_of_every_family_gives_the_text_of_one_process(tmp_path, family, size):
    check_texts(tmp_path, family, size, list(RUNS))


def rank_shares(rank, folder):
    model = shared_model(folder)
    dec = Decoder(model)
    made = []
    with pytest.MonkeyPatch.context() as patch:
        allocate = LayeredCache._allocate
        patch.setattr(LayeredCache, "_allocate", lambda *args: (allocate(*args), made.append(args[0].nbytes)))
        dec.generate(prompt_ids(), 8, "ar", SAMPLING)
    held = {name: own_part(weight).nbytes for name, weight in model.named_parameters()}
    return held, dec.target.kv_bytes, max(made)


def test_each_process_holds_its_share_of_weights_and_caches(tmp_path):
    model = tiny("gqa", tmp_path)
    whole = {name: weight.nbytes for name, weight in model.named_parameters()}
    plan = shared_parameters(whole, model.tp_plan)
    assert whole.keys() - plan == {name for name in whole if "norm" in name}
    shares = on_ranks(2, rank_shares, tmp_path)
    for held, kv_bytes, cache_bytes in shares:
        assert kv_bytes * 2 == Decoder(model).target.kv_bytes
        assert cache_bytes == kv_bytes * (40 + 8 + 1)
        for name, size in held.items():
            assert size * (2 if name in plan else 1) == whole[name], name


def folder_with_tokenizer(folder, family="gqa", **overrides):
    """A tiny model in float32 for `load` and the command, with the reference model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REFERENCE / name, folder)
    tiny(family, vocab_size=4096, **overrides).float().save_pretrained(folder)
    return folder


def rank_command(rank, *runs):
    """Status, standard output and error of each run of the command; ``runs`` are its arguments."""
    found = []
    for arguments in runs:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(part) for part in arguments])
        found.append((status, out.getvalue(), err.getvalue()))
    return found


def command(model, *more):
    given = ("--prompt", "It was a dark night", "--max-new-tokens", 12, "--ignore-eos", "--dtype", "float64")
    return ["--model", model, *given, "--seed", 5, "--method", "prompt-lookup", *more]


def test_the_command_writes_the_text_once_and_resumes_it(tmp_path):
    model = folder_with_tokenizer(tmp_path)
    [(status, text, _)] = rank_command(0, command(model))
    output = ("--tensor-parallel", "--output", tmp_path / "story.txt")
    cut = command(model, *output, "--stop", "\x00")
    cut[cut.index(12)] = 5
    runs = (cut, [*command(model, *output, "--stop", "\x00"), "--resume", "--audit"])
    first, other = on_ranks(2, rank_command, *runs)
    assert (status, first[1][:2]) == (0, (0, text))
    assert (tmp_path / "story.txt").read_text() == text
    assert "12 tokens (5 of them before)" in first[1][2] and "all 12 tokens are the model's own choices" in first[1][2]
    assert other == [(0, "", "")] * 2


def test_a_wrong_argument_is_told_once(tmp_path):
    model = folder_with_tokenizer(tmp_path)
    runs = [
        command(tmp_path / "none", "--tensor-parallel"),
        command(model, "--tensor-parallel", "--max-new-tokens", 999),
    ]
    first, other = on_ranks(2, rank_command, *runs)
    assert [status for status, *_ in first] == [status for status, *_ in other] == [2, 2]
    for words, (*_, told), (*_, also_told) in zip(("no model folder", "beyond the 512 pos"), first, other, strict=True):
        assert words in told + also_told and (told + also_told).count("\n") == 1


def rank_refusal(rank, *by_rank):
    """What is told to a process that loads a model and is given arguments to generate with."""
    model, *arguments = by_rank[rank]
    try:
        load(model, tensor_parallel=True, dtype="float64").generate([1, 2], *arguments)
    except ValueError as error:
        return str(error)


def test_processes_with_other_weights_or_arguments_are_refused(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        folder_with_tokenizer(folder)
    weights = load_file(folders[1] / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] += 1
    save_file(weights, folders[1] / "model.safetensors", {"format": "pt"})
    told = on_ranks(2, rank_refusal, *((folder, 4) for folder in folders))
    sentence = (
        "process 1 was given another {} than process 0: start all of them with the same command and the same files"
    )
    assert told == [sentence.format("model")] * 2
    told = on_ranks(2, rank_refusal, (folders[0], 4), (folders[0], 5))
    assert told == [sentence.format("length")] * 2


@pytest.mark.parametrize(("kv_heads", "fitting"), [(3, "1 or 3"), (1, "1")])
def test_heads_that_cannot_be_shared_evenly_are_refused(tmp_path, kv_heads, fitting):
    model = folder_with_tokenizer(tmp_path, num_key_value_heads=kv_heads)
    words = f"2 processes cannot share the 12 query and {kv_heads} KV heads of this llama evenly: start {fitting}"
    assert on_ranks(2, rank_refusal, (model, 4), (model, 4)) == [words] * 2


def rank_dies(rank, model):
    dec = load(model, tensor_parallel=True, dtype="float64")
    start = time.monotonic()
    try:
        for number, _ in enumerate(dec.stream([1, 2, 3], 100, "ar")):
            if rank == 1 and number == 3:
                os._exit(9)
    except OSError as error:
        return str(error), time.monotonic() - start


def test_a_process_that_dies_ends_the_others_with_one_sentence(tmp_path):
    first, dead, last = on_ranks(3, rank_dies, folder_with_tokenizer(tmp_path))
    assert dead is None
    for sentence, seconds in (first, last):
        assert "another process of this run has ended" in sentence and seconds < 60


def rank_hangs(rank, model):
    # Set before: it is of no use to change it when the processes have met.
    os.environ[TIMEOUT] = "3"
    dec = load(model, tensor_parallel=True, dtype="float64")
    try:
        for number, _ in enumerate(dec.stream([1, 2, 3], 100, "ar")):
            start = time.monotonic()
            if rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGSTOP)
    except OSError as error:
        return str(error), time.monotonic() - start


def test_a_process_that_hangs_ends_the_others_within_the_time_that_is_set(tmp_path):
    first, _, last = on_ranks(3, rank_hangs, folder_with_tokenizer(tmp_path), hanging=(1,))
    for sentence, seconds in (first, last):
        assert f"silent for longer than {TIMEOUT} says" in sentence and 1 < seconds < 15


@pytest.mark.parametrize("given", ["soon", "0", "1e9", "nan"])
def test_a_timeout_that_is_none_is_refused(monkeypatch, given):
    monkeypatch.setenv(TIMEOUT, given)
    with pytest.raises(ValueError, match=f"{TIMEOUT} must be seconds"):
        ranks._patience()


def test_a_process_that_torchrun_ends_says_why_and_is_not_cut_off_meanwhile():
    """torchrun sends SIGTERM to all others once one has ended, often before these have noticed."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with ending_in_words():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(ConnectionError, match="another process of this run has ended"), linked(), ending_in_words():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(ConnectionError), linked(), ending_in_words():
            raise RuntimeError("gloo: connection closed by peer")
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_process_alone_is_told_how_to_start_several(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="start them by torchrun --nproc-per-node N"):
        load(tmp_path, tensor_parallel=True)
