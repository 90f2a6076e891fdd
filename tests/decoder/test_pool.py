"""Buffers with their recorded passes outlive a text where passes are recorded, and serve the texts that follow."""

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decoder import Decoder, methods
from decoder.backends.cuda import cuda_graphs
from decoder.backends.cuda.host_reads import HostReadError, HostReadsRefused
from decoder.cache.full import FullCache
from decoder.cache.layout import Layout
from decoder.cache.pool import BufferPool, rounded

from .conftest import VOCAB, tiny_llama, with_recorder
from .tape import TapeRecorder
from .test_graphs import NARROW, SAMPLING, decoder_with


@pytest.fixture
def poisoned(monkeypatch):
    """What texts leave in their buffers is no number to the next."""
    give_back = BufferPool.give_back

    def spoiled(self, cache):
        with torch.inference_mode():
            for buffer in (cache.keys, cache.values):
                buffer.fill_(torch.nan)
        give_back(self, cache)

    monkeypatch.setattr(BufferPool, "give_back", spoiled)


def generate(dec, prompt, method="tokenswift", length=60, options=NARROW):
    return dec.generate(prompt, length, method, SAMPLING, options).token_ids


# What these two draft depends on measured times, so neither their passes nor what is recorded of them can be counted.
TIMED = ("auto", "suffix")


@pytest.fixture(scope="module")
def plain(prompt):
    """Plain decoding of the prompt without its first tokens, without any pool."""
    return [generate(decoder_with("gated"), prompt[k:], "ar", 40) for k in range(4)]


@pytest.mark.parametrize("method", sorted(set(methods()) - set(TIMED)))
def test_a_second_text_records_nothing_anew(as_on_cuda, poisoned, plain, prompt, method):
    """Nor does what the first has left in its buffers matter, to a text of another length either."""
    recorder = TapeRecorder()
    dec = with_recorder(decoder_with("gated"), recorder)
    assert generate(dec, prompt, method, 40) == plain[0]
    recorded, rehearsed, replayed = recorder.recorded, recorder.rehearsed, recorder.replayed
    assert generate(dec, prompt, method, 40) == plain[0]
    assert recorder.recorded == recorded
    # The prompt's pass and the last steps' are of widths that come once in a text, and are run as they are.
    assert recorder.rehearsed - rehearsed == rehearsed - recorded
    assert recorder.replayed > replayed + 5
    assert generate(dec, prompt[3:], method, 40) == plain[3]


@pytest.mark.parametrize("method", TIMED)
def test_timed_methods_give_the_same_text_over_what_others_have_left(as_on_cuda, poisoned, plain, prompt, method):
    dec = with_recorder(decoder_with("gated"), TapeRecorder())
    for used in (method, "tokenswift", method):
        assert [generate(dec, prompt[k:], used, 40) for k in range(2)] == plain[:2]


def test_streams_that_are_closed_or_fail_give_back_and_those_that_interleave_share_nothing(
    as_on_cuda, poisoned, prompt
):
    dec, recorder = decoder_with("chained"), TapeRecorder()
    expected = [generate(dec, prompt[k:], "ar") for k in range(3)]
    with_recorder(dec, recorder)

    def failing(context, logits):
        if len(context) > len(prompt) + 12:
            raise KeyError("the hook's own")
        return logits

    with pytest.raises(KeyError):
        dec.generate(prompt, 60, "ar", SAMPLING, logits_hook=failing)
    del failing
    gc.collect()
    assert dec.target.pool.nbytes
    stream = dec.stream(prompt, 60, "ar", SAMPLING)
    next(stream)
    assert not dec.target.pool.nbytes
    stream.close()
    del stream
    assert dec.target.pool.nbytes
    recorded = recorder.recorded
    assert generate(dec, prompt, "ar") == expected[0]
    assert recorder.recorded == recorded
    streams = [dec.stream(prompt[k:], 60, "tokenswift", SAMPLING, NARROW) for k in range(3)]
    found = [[], [], []]
    for _ in range(60):
        for one, tokens in zip(streams, found, strict=True):
            tokens += [token for chunk in [next(one, None)] if chunk for token in chunk.token_ids]
    assert found == expected


def test_what_waits_is_one_text_of_the_last_ones_size(as_on_cuda, prompt):
    dec = with_recorder(decoder_with("chained"), TapeRecorder())
    waiting = dec.target.pool
    # Buffers are as large as the text may become, however early it stops.
    assert len(dec.generate(prompt, 3000, "ar", SAMPLING, stop=list(range(VOCAB))).token_ids) == 1
    large = waiting.nbytes
    assert large == dec.target.kv_bytes * rounded(len(prompt) + 3000 + 1)
    stream = dec.stream(prompt, 20, "ar", SAMPLING)
    next(stream)
    # Freed before the small one begins, so that no more is held than a text needs.
    assert waiting.nbytes == 0
    list(stream)
    del stream
    assert 0 < waiting.nbytes <= large / 8
    streams = [dec.stream(prompt, 20, "ar", SAMPLING) for _ in range(3)]
    for one in streams:
        list(one)
    streams.clear()
    assert waiting.nbytes == dec.target.kv_bytes * rounded(len(prompt) + 20 + 1)
    dec.generate_batch([prompt, prompt[1:]], 5, "ar", SAMPLING)
    assert waiting.nbytes <= dec.target.kv_bytes * rounded(len(prompt) + 20 + 1)


def test_nothing_is_kept_where_nothing_is_recorded(prompt):
    dec = decoder_with("gated")
    for method in ("ar", "tokenswift", "magicdec", "triforce"):
        generate(dec, prompt, method)
        assert not dec.target.pool.nbytes and not dec.draft_target.pool.nbytes
        assert not dec.target.pool._waiting


def modified(change):
    """The text of a model that was changed before its second text, by one decoder and by a new one."""
    prompt = list(range(5, 40))
    recorder = TapeRecorder()
    model = tiny_llama()
    dec = with_recorder(Decoder(model), recorder)
    before = generate(dec, prompt, "ar")
    recorded = recorder.recorded
    change(model)
    after = generate(dec, prompt, "ar")
    fresh = generate(Decoder(model), prompt, "ar")
    return before, after, fresh, recorder.recorded - recorded


def in_place(model):
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1)


def replace(model):
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * -1)


def hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)


def attribute(model):
    model.model.layers[0].self_attn.scaling *= 3


def forward(model):
    layer = model.model.layers[1].mlp
    own = layer.forward
    layer.forward = lambda x: -own(x)


def module(model):
    own = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(own, torch.nn.Tanh())


@pytest.mark.parametrize("change", [in_place, replace, hook, attribute, forward, module])
def test_a_model_that_was_changed_is_recorded_anew_where_a_recording_would_not_see_it(as_on_cuda, poisoned, change):
    before, after, fresh, recorded = modified(change)
    assert after == fresh != before
    # What weights hold is read by each replay.
    assert (recorded == 0) == (change is in_place)


def test_a_change_while_a_text_runs_is_not_what_its_buffers_bring_to_the_next(as_on_cuda, poisoned, prompt):
    model = tiny_llama()
    dec = with_recorder(Decoder(model), TapeRecorder())
    first = dec.stream(prompt, 40, "ar", SAMPLING)
    for _ in range(5):
        next(first)
    replace(model)
    expected = generate(Decoder(model), prompt, "ar", 40)
    # A second text takes the change in, and the first one's buffers come back later.
    assert generate(dec, prompt, "ar", 40) == expected
    first.close()
    del first
    assert generate(dec, prompt, "ar", 40) == expected


def test_texts_under_autocast_bring_no_buffers_of_its_dtype(as_on_cuda, prompt):
    dec = with_recorder(Decoder(tiny_llama(torch.float32)), TapeRecorder())
    expected = generate(Decoder(tiny_llama(torch.float32)), prompt, "ar")
    with torch.autocast("cpu", torch.bfloat16):
        generate(dec, prompt, "ar")
    assert not dec.target.pool.nbytes
    assert generate(dec, prompt, "ar") == expected


def test_capacities_are_few_and_hardly_larger():
    capacities = [rounded(n) for n in range(1, 40_000)]
    assert all(n <= capacity <= max(n + n // 16, n + 255) for n, capacity in enumerate(capacities, start=1))
    assert len(set(capacities)) < 80 and capacities == sorted(capacities)
    assert [rounded(n) for n in (1, 256, 257, 10_000, 40_000)] == [256, 256, 512, 10_240, 40_960]
    # Shapes of tensors.
    assert {type(capacity) for capacity in capacities} == {int}


def used_cache(capacity, waiting):
    """A cache over which a pass of one token has run."""
    made = FullCache(capacity)
    made.prepare(Layout.of_full(2), waiting)
    made.begin(1)
    for layer in range(2):
        made.update(*torch.zeros(2, 1, 2, 1, 8).unbind(), layer)
    return made


@pytest.mark.parametrize(("capacity", "serves"), [(2048, True), (1024, True), (1023, True), (768, False)])
def test_buffers_serve_texts_that_need_all_of_them_or_no_less_than_half(as_on_cuda, capacity, serves):
    waiting = BufferPool(torch.device("cpu"))
    first = used_cache(2048, waiting)
    # Held, so that the address is not given out again if they do not serve.
    held = first.keys
    del first
    assert (used_cache(capacity, waiting).keys.data_ptr() == held.data_ptr()) == serves


def test_larger_buffers_serve_and_much_larger_ones_do_not(as_on_cuda):
    waiting = BufferPool(torch.device("cpu"))

    def cache(capacity):
        return used_cache(capacity, waiting)

    first = cache(1000)
    assert first.capacity == rounded(1000)
    address = first.keys.data_ptr()
    del first
    second = cache(600)
    assert second.keys.data_ptr() == address and second.capacity == rounded(1000)
    del second
    third = cache(100)
    assert third.capacity == rounded(100) and not waiting.nbytes
    del third
    assert cache(5000).capacity == rounded(5000)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.copy_(torch.zeros(4)),
        lambda x: torch.zeros(4).copy_(x),
        lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long, device="meta")),
        lambda x: torch.tensor([1.0, 2.0]).to(x.device),
        lambda x: x.index_put_((x > 0,), torch.zeros((), device="meta")),
        lambda x: torch.equal(x, x),
        lambda x: x.long().bincount(),
    ],
)
def test_what_makes_the_host_wait_is_found(operation):
    with torch.inference_mode(), HostReadsRefused(), pytest.raises(HostReadError, match="makes the host wait"):
        operation(torch.zeros(4, device="meta"))


def test_what_does_not_wait_is_let_pass_and_other_threads_may_do_what_they_like():
    x = torch.zeros(4, 4, device="meta")
    elsewhere = []
    with torch.inference_mode(), HostReadsRefused():
        index = torch.arange(2, device="meta")
        x[index], x[1:], x.masked_fill(x > 0, 1.0), x @ x, x.index_copy_(0, index, x[:2]), x.to(torch.bfloat16)
        x.copy_(torch.zeros(4, 4), non_blocking=True)
        x.topk(2), x.sort(), x.softmax(-1), x.repeat_interleave(2, 0), x + 1, x * torch.tensor(2.0)
        # What is on the host may be read.
        assert torch.ones(3)[torch.ones(3) > 0].sum().item() == 3
        thread = threading.Thread(target=lambda: elsewhere.append(torch.zeros(3, device="meta").nonzero))
        thread.start()
        thread.join()
    assert len(elsewhere) == 1


def test_what_has_a_kernel_of_its_own_runs_as_it_runs_unchecked():
    """On CUDA that is a root-mean-square norm, whose composite form rounds in other places."""
    names = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    x = torch.arange(8.0).view(1, 4, 2)
    operation = torch.ops.aten.native_channel_shuffle
    assert operation.default.decompose(x, 2).equal(operation(x, 2))
    with torch.inference_mode(), Noted(), HostReadsRefused():
        operation(x, 2)
        torch.nn.functional.linear(x, torch.ones(3, 2))
    assert names[0] == "native_channel_shuffle" and "mm" in names and "linear" not in names


def test_no_two_recorders_that_are_alive_record_on_one_stream(monkeypatch):
    """PyTorch hands out a few streams in turn; a workspace of cuBLAS belongs to one of them."""
    handed = []

    class Stream:
        def __init__(self, device):
            self.cuda_stream = len(handed) % 3
            handed.append(self)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    alive = []
    for device in (0, 0, 1, 0):
        stream = cuda_graphs._unused_stream(device)
        alive.append(SimpleNamespace(device=device, _stream=stream))
        monkeypatch.setattr(cuda_graphs, "_recorders", alive)
    assert sorted(one._stream.cuda_stream for one in alive if one.device == 0) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="no stream left"):
        cuda_graphs._unused_stream(0)
    del alive[1]
    assert cuda_graphs._unused_stream(0).cuda_stream not in {one._stream.cuda_stream for one in alive if not one.device}
