"""Passes of fixed shape, which CUDA records and replays; here a tape stands in for CUDA's graphs."""

import gc
import weakref
from itertools import islice

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.backends import modules
from decoder.backends.base import AttentionShape
from decoder.backends.cuda import backend, cuda_graphs, split_kv
from decoder.backends.cuda.backend import CudaBackend
from decoder.backends.cuda.cuda_graphs import CudaGraphs, padded_width
from decoder.backends.cuda.split_kv import split_kv_attention
from decoder.backends.probe import Probed
from decoder.cache import full, pool, streaming
from decoder.cache.full import FullCache
from decoder.cache.layout import FULL, Layout
from decoder.cache.partial import PartialCache
from decoder.cache.streaming import RecentCache
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.model import target
from decoder.model.target import Target
from decoder.sampling.token_tree import TokenTree
from decoder.work import finish

from .conftest import all_heads, clocked, random_heads, some, tiny_llama, with_recorder
from .tape import TapeRecorder, eager_attention
from .test_families import FAMILIES, OF_EACH_KIND, tiny
from .test_walk import HostReads

SAMPLING = SamplingParams(seed=2, min_p=0.1, repetition_penalty=1.2, penalty_window=64)
NARROW = TokenSwiftOptions(tree=(1, 2, 2), ngrams=2, budget=30)


class Unrecorded(TapeRecorder):
    """Where nothing can be recorded."""

    def warm_up(self, run):
        return False, run()


def decoder_with(kind):
    model = tiny_llama()
    return Decoder(model, heads=all_heads(model, kind), draft_model=tiny_llama(seed=2, num_hidden_layers=1))


@pytest.mark.parametrize("kind", ["chained", "gated"])
def test_recorded_passes_give_the_same_text(as_on_cuda, prompt, monkeypatch, kind):
    """Against plain decoding of growing views; a replay knows no length but the one in memory."""
    # By the machine's clock `auto` and `suffix` may draft a tree of another width in every step.
    clocked(monkeypatch, 0.1)
    expected = decoder_with(kind).generate(prompt, 60, "ar", SAMPLING)
    for method in methods() if kind == "chained" else ("auto", "medusa", "tokenswift", "tokenswift-fused"):
        recorder = TapeRecorder()
        out = with_recorder(decoder_with(kind), recorder).generate(prompt, 60, method, SAMPLING, NARROW)
        assert out.token_ids == expected.token_ids, method
        assert recorder.recorded <= recorder.rehearsed
        assert recorder.replayed > 0.7 * out.stats.steps, method


def test_the_kernel_itself_in_a_generation(as_on_cuda, prompt, monkeypatch):
    """The split-KV kernel reads the stacked buffers, the length and the tree as the passes hand them over."""
    pytest.importorskip("triton", reason="Triton is built for Linux only")
    from .triton_emulation import repair_emulation

    repair_emulation()
    calls = []

    def both(*arguments):
        calls.append(arguments)
        return split_kv_attention(*arguments)

    dec = decoder_with("chained")
    prompt = prompt[:18]
    expected = dec.generate(prompt, 4, "ar", SAMPLING).token_ids
    monkeypatch.setattr(split_kv, "split_kv_attention", both)
    tree = TokenSwiftOptions(tree=(1, 2), ngrams=0, budget=20)
    # Kernels that are emulated leave nothing on a tape.
    out = with_recorder(dec, Unrecorded()).generate(prompt, 4, "tokenswift", SAMPLING, tree)
    assert out.token_ids == expected
    assert {query.shape[2] for query, *_ in calls} >= {17, 1, 4}
    assert all(committed.numel() == 1 and key.shape[2] > query.shape[2] for query, key, _, committed, *_ in calls)


READS = [("ar", "chained", 1), ("suffix", "chained", 1), ("prompt-lookup", "chained", 1), ("medusa", "chained", 1)]
READS += [
    ("magicdec", "chained", 2),
    ("tokenswift", "chained", 2),
    ("tokenswift", "gated", 2),
    ("tokenswift-fused", "gated", 1),
]


@pytest.mark.parametrize("method, kind, reads", READS)
def test_a_step_reads_once_and_once_more_where_the_model_drafts(as_on_cuda, prompt, monkeypatch, method, kind, reads):
    """Outside of its passes: they could not be recorded if they read from the device."""
    run = CudaBackend.run

    def uncounted(*arguments, **named):
        before = counter.reads
        result = run(*arguments, **named)
        counter.reads = before
        return result

    stream = with_recorder(decoder_with(kind), Unrecorded()).stream(prompt, 60, method, SAMPLING, NARROW)
    next(stream)
    counter, seen = HostReads(), []
    monkeypatch.setattr(CudaBackend, "run", uncounted)
    for _ in range(12):
        with counter:
            next(stream)
        seen.append(counter.reads)
    assert max(seen) == reads


@pytest.mark.parametrize("family", some(FAMILIES, OF_EACH_KIND))
def test_the_passes_of_every_family_are_recorded_and_give_the_same_text(as_on_cuda, prompt, family):
    model_type, overrides = FAMILIES[family]
    model = tiny(model_type, **overrides)
    plain, fixed = (Decoder(model, heads=random_heads(model)) for _ in range(2))
    recorder = TapeRecorder()
    expected = plain.generate(prompt, 16, "ar", SAMPLING).token_ids
    out = with_recorder(fixed, recorder).generate(prompt, 16, "tokenswift", SAMPLING, NARROW)
    assert out.token_ids == expected
    # Experts that run one after the other let the host ask which of them have work.
    experts = any(type(module).__name__.endswith("Experts") for module in model.modules())
    assert (recorder.replayed > 0) == (not experts)


def test_a_cache_that_grows_drops_what_was_recorded_over_its_old_buffers(as_on_cuda, prompt, monkeypatch):
    monkeypatch.setattr(full, "_SMALLEST_GROWTH", 32)
    monkeypatch.setattr(pool, "_SMALLEST_STEP", 16)
    dec, recorder = decoder_with("chained"), TapeRecorder()
    expected = dec.generate(prompt, 200, "ar", SAMPLING).token_ids
    tokens = []
    for chunk in with_recorder(dec, recorder).stream(prompt, None, "tokenswift", SAMPLING, NARROW):
        tokens += chunk.token_ids
        if len(tokens) >= 200:
            break
    assert tokens[:200] == expected
    assert recorder.recorded > 4


def test_passes_that_cannot_be_recorded_run_as_they_are(as_on_cuda, prompt):
    dec, recorder = decoder_with("chained"), Unrecorded()
    expected = dec.generate(prompt, 60, "ar", SAMPLING).token_ids
    assert with_recorder(dec, recorder).generate(prompt, 60, "tokenswift", SAMPLING, NARROW).token_ids == expected
    assert recorder.recorded == recorder.replayed == 0


def test_after_a_recording_that_failed_passes_run_as_they_are(as_on_cuda, prompt):
    """Told once, with what went wrong first in it; what was recorded before is replayed on."""

    class Breaking(TapeRecorder):
        def record(self, run):
            replay, outputs = super().record(run)
            if self.recorded < 2:
                return replay, outputs
            try:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")
            finally:
                raise RuntimeError("the recording was invalidated")

    dec, recorder = decoder_with("chained"), Breaking()
    expected = dec.generate(prompt, 60, "ar", SAMPLING).token_ids
    with pytest.warns(UserWarning, match="off on cpu: RuntimeError: operation not permitted. .*doctor") as told:
        try:
            raise torch.OutOfMemoryError("the user tries again with this")
        except torch.OutOfMemoryError:
            out = with_recorder(dec, recorder).generate(prompt, 60, "tokenswift", SAMPLING, NARROW)
    assert out.token_ids == expected
    assert len(told) == 1
    assert recorder.recorded == 2
    assert recorder.replayed > 2


def test_memory_that_runs_out_in_a_recording_is_told_as_that(as_on_cuda, prompt):
    class Full(TapeRecorder):
        def record(self, run):
            try:
                raise torch.OutOfMemoryError("no memory is left")
            finally:
                raise RuntimeError("the recording was invalidated")

    with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
        with_recorder(decoder_with("chained"), Full()).generate(prompt, 60, "tokenswift", SAMPLING, NARROW)


def test_what_autocast_makes_of_weights_is_not_recorded(as_on_cuda, prompt):
    """Its copies go when the user's block ends, and a graph would go on reading where they were."""
    recorder = TapeRecorder()
    dec = with_recorder(decoder_with("chained"), recorder)
    stream = dec.stream(prompt, 12, "ar", SAMPLING)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(6):
            next(stream)
    assert recorder.rehearsed == recorder.recorded == 0
    assert len(list(stream)[-1].output.token_ids) == 12
    assert recorder.replayed > 2


def test_interleaved_generations_leave_each_others_passes_alone(as_on_cuda, prompt):
    expected = [decoder_with("gated").generate(prompt[k:], 60, "ar", SAMPLING).token_ids for k in range(3)]
    dec = with_recorder(decoder_with("gated"), TapeRecorder())
    streams = [
        dec.stream(prompt[k:], 60, method, SAMPLING, NARROW)
        for k, method in enumerate(("tokenswift", "tokenswift-fused", "auto"))
    ]
    found = [[] for _ in streams]
    while any(len(tokens) < 60 for tokens in found):
        for stream, tokens in zip(streams, found, strict=True):
            tokens += [token for chunk in islice(stream, 1) for token in chunk.token_ids]
    assert found == expected


def test_a_logits_hook_may_keep_what_it_is_given(as_on_cuda, prompt):
    """The next pass writes over the logits of the one before."""
    kept = [[], []]
    for hooked, fixed in zip(kept, (False, True), strict=True):
        dec = decoder_with("chained")
        if fixed:
            with_recorder(dec, TapeRecorder())
        dec.generate(prompt, 20, "ar", SAMPLING, logits_hook=lambda _, logits, to=hooked: to.append(logits) or logits)
    torch.testing.assert_close(*kept)


def test_a_finished_generation_frees_its_cache_and_passes_at_once(as_on_cuda, prompt, monkeypatch):
    """Without the garbage collector: a cache of a long text is gigabytes."""
    caches = []

    class Watched(FullCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            caches.append(weakref.ref(self))

    monkeypatch.setattr("decoder.cache.stored.FullCache", Watched)
    dec = with_recorder(decoder_with("gated"), TapeRecorder())
    gc.collect()
    gc.disable()
    try:
        for method in methods():
            dec.generate(prompt, 40, method, SAMPLING, NARROW)
        assert len(caches) == len(methods())
        assert not [cache for cache in caches if cache() is not None]
    finally:
        gc.enable()


def test_passes_and_caches_stay_on_the_models_device(monkeypatch, prompt):
    """On the meta device, which refuses what would mix devices on CUDA or read a number there."""

    shape = AttentionShape(4, 2, 8, 8, torch.float64)
    monkeypatch.setattr(
        target, "probe", lambda *given: Probed(1.0, {FULL: shape}, Layout.of_full(2), {}, None, 0, False)
    )
    monkeypatch.setattr(target, "refuse_devices", lambda model, device: None)
    monkeypatch.setattr(split_kv, "split_kv_attention", eager_attention)
    monkeypatch.setattr(backend, "split_kv_fault", lambda *given: None)
    for module in (backend, cuda_graphs, modules, target, full, streaming):
        monkeypatch.setattr(module, "upload", lambda numbers, device: torch.as_tensor(numbers).to(device))

    class Running(TapeRecorder):
        def record(self, run):
            return lambda: None, run()

    with torch.device("meta"):
        model = tiny_llama()
    on_meta = Target(model)
    on_meta.use(CudaBackend(on_meta, Running()))
    cache, partial, recent = FullCache(200), PartialCache(20, sink=4), RecentCache(30, sink=20, room=1)
    with torch.inference_mode(), on_meta.patched():
        queries = on_meta.prefill(prompt, cache, observed=1)
        partial.append(cache, queries)
        recent.append(cache)
        recent.select(cache, queries)
        for _ in range(8):
            tree = TokenTree(1)
            for node in range(5):
                tree.add(node // 2, node, "test")
            for draft_cache in (partial, recent):
                assert on_meta.draft([1], cache.length, draft_cache).is_meta
            [verification] = on_meta.forward([tree], [cache], observe=True)
            assert verification.logits.is_meta and len(verification.logits) == 6
            cache.keep([0, 2, 5])
            partial.append(cache, verification.queries, 5)
            recent.append(cache)
    assert partial.rebuilds > 1 and cache.keys.is_meta and partial.keys.is_meta and cache.kv_length.is_meta


def test_trees_of_all_sizes_share_a_few_widths():
    widths = [padded_width(nodes) for nodes in range(1, 300)]
    assert all(width >= nodes for nodes, width in enumerate(widths, start=1))
    assert widths == sorted(widths)
    assert len(set(widths[:64])) <= 9
    assert all(width <= 1.6 * nodes + 4 for nodes, width in enumerate(widths, start=1))


def test_a_tree_costs_what_its_padded_width_does(as_on_cuda, monkeypatch):
    """So that trees fill the widths they are verified at anyway."""
    monkeypatch.setattr(VerifyCosts, "_time", lambda self, width, cache: 1.0 + width)
    dec = decoder_with("chained")
    plain = finish(dec.verify_costs._measure(FullCache(1), {}))
    fixed = finish(with_recorder(dec, Unrecorded()).verify_costs._measure(FullCache(1), {}))
    assert plain[1:] == pytest.approx([1.0 + nodes for nodes in range(1, 65)])
    assert fixed[1:] == pytest.approx([1.0 + padded_width(nodes) for nodes in range(1, 65)])


@pytest.mark.gpu
def test_cuda_replays_nearly_every_pass(prompt):
    """In bfloat16, where nothing is identical anyhow: what counts is that graphs run."""

    class Counting(CudaGraphs):
        recorded = replayed = 0

        def record(self, run):
            replay, outputs = super().record(run)
            self.recorded += 1

            def counted():
                self.replayed += 1
                replay()

            return counted, outputs

    model = tiny_llama(torch.bfloat16).cuda()
    dec = Decoder(model, heads=random_heads(model, kind="gated"))
    for method in ("ar", "tokenswift", "tokenswift-fused"):
        dec.target.use(CudaBackend(dec.target, Counting(dec.target.device)))
        out = dec.generate(prompt, 300, method, SAMPLING, NARROW)
        assert dec.target.backend.recorder.replayed > 0.9 * out.stats.steps, method
        assert dec.target.backend.recorder.recorded <= 12


@pytest.mark.gpu
def test_cuda_generations_interleave_and_a_later_one_records_again(prompt):
    """What was recorded goes with a generation; the next one records into the memory it left."""
    dec = Decoder(tiny_llama().cuda(), heads=random_heads(tiny_llama()))
    expected = [decoder_with("chained").generate(prompt[k:], 60, "ar", SAMPLING).token_ids for k in range(2)]
    for _ in range(2):
        streams = [dec.stream(prompt[k:], 60, "tokenswift", SAMPLING, NARROW) for k in range(2)]
        found = [[], []]
        while any(len(tokens) < 60 for tokens in found):
            for stream, tokens in zip(streams, found, strict=True):
                tokens += [token for chunk in islice(stream, 1) for token in chunk.token_ids]
        assert found == expected
        del stream, streams
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_cuda_rehearsals_find_a_pass_that_waits_and_only_that():
    recorder = CudaGraphs(torch.device("cuda", 0))
    numbers = torch.ones(8, 8, device="cuda")
    assert recorder.warm_up(lambda: numbers @ numbers)[0]
    recordable, waited = recorder.warm_up(lambda: numbers[numbers > 0])
    assert not recordable and waited.numel() == 64
    assert torch.cuda.get_sync_debug_mode() == 0
    replay, doubled = recorder.record(lambda: numbers * 2)
    numbers.fill_(3)
    replay()
    assert doubled.eq(6).all()


@pytest.mark.gpu
def test_cuda_passes_equal_those_of_a_cpu(prompt):
    """One verification after another over a growing text, recorded on CUDA, against float64 on a CPU."""
    targets = [Target(tiny_llama()), Target(tiny_llama().cuda())]
    caches = [FullCache(500), FullCache(500)]
    for each, cache in zip(targets, caches, strict=True):
        with torch.inference_mode(), each.patched():
            each.prefill(prompt, cache)
    for step in range(12):
        tree = TokenTree(step)
        for node in range(step % 5):
            tree.add(node // 2, 7 + node, "test")
        seen = []
        for each, cache in zip(targets, caches, strict=True):
            with torch.inference_mode(), each.patched():
                seen.append(each.forward([tree], [cache])[0].logits.cpu().clone())
                cache.keep([0, len(tree) - 1] if len(tree) > 1 and tree.parents[-1] == 0 else [0])
        # Norms and rotary embeddings are in single precision in both.
        torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-5)
