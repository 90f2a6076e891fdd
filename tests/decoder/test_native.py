"""The native library: right beside PyTorch's operators in float64, and each row with the bits that it has alone."""

import multiprocessing
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

import decoder
from decoder import Decoder, SamplingParams
from decoder.backends.attention import Scores
from decoder.backends.native import library as native
from decoder.backends.native import native_attention
from decoder.backends.native.backend import NATIVE
from decoder.backends.native.native_attention import NewTokens
from decoder.backends.native.packed_weight import Fp32Weight, NativeWeight, pack
from decoder.backends.native.quantised import QuantisedWeight, pack_for_drafts
from decoder.backends.reference.attention import Masked, masked_softmax
from decoder.cache import layout
from decoder.cache.form import CacheForm, Codes
from decoder.cache.full import FullCache
from decoder.cache.layout import LayerKind, Layout
from decoder.model.gguf import formats as gguf_formats
from decoder.model.rounding import rounded
from decoder.sampling.token_tree import TokenTree

from .conftest import all_heads, random_heads, tiny_llama
from .test_bitwise_split_kv import random_tree

needs_native = pytest.mark.skipif(not native.available(), reason="there is no C compiler here")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SPLIT = 256  # keys that are summed together
SAMPLING = SamplingParams(temperature=0.9, seed=3)
ROUNDED = CacheForm("int8")


@pytest.fixture(params=["numbers", "codes"])
def coded(request):
    """Whether the cache keeps keys and values as codes of int8."""
    return request.param == "codes"


def case(length, new, dtype, heads=6, kv_heads=2, dim=16, value_dim=None, spare=3):
    """Heads as layers make them, and a cache with nothing but NaN behind the new tokens."""
    torch.manual_seed(length)
    rows = torch.randn(new, heads + 2 * kv_heads, dim).to(dtype)
    pairs = [torch.randn(1, kv_heads, length + new + spare, size).to(dtype) for size in (dim, value_dim or dim)]
    for buffer in pairs:
        buffer[:, :, length + new :] = torch.nan
    return rows, *pairs


def attend(rows, key, value, length, mask=None, heads=6, coded=False, **scores):
    new = [NewTokens(length, len(rows), mask, length)]
    kept = [Codes(*ROUNDED.encode(pairs)) if coded else pairs for pairs in (key, value)]
    keys, values = ([one] for one in kept)
    return native_attention.native_attention(rows, heads, keys, values, new, Scores(0.3, **scores))


def read(pairs, coded):
    """Keys or values in float64 as attention sees them."""
    if not coded:
        return pairs.double()
    codes, scales = ROUNDED.encode(pairs)
    return codes.view(torch.int8).double() * scales.double()


def obvious(rows, key, value, length, mask=None, heads=6, coded=False):
    """One masked softmax in float64."""
    new = len(rows)
    key, value = read(key, coded), read(value, coded)
    seen = torch.ones(new, new, dtype=torch.bool).tril() if mask is None else mask
    wide = (pairs[:, :, : length + new] for pairs in (key, value))
    output = masked_softmax(rows[None, :, :heads].transpose(1, 2).double(), *wide, ~seen, Scores(0.3))
    return output[0].transpose(0, 1).flatten(1)


def near(found, expected, dtype, coded=False):
    """Codes are multiplied by queries and weights of 16 bits."""
    allowed = max(TOLERANCE[dtype], 3e-4 * coded)
    return float((found.double() - expected).abs().max()) <= allowed * float(expected.abs().max())


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 15, 63, 64, SPLIT - 9, SPLIT - 1, SPLIT, 2 * SPLIT + 7, 1500])
def test_a_node_has_the_bits_it_has_alone_and_those_of_softmax(length, dtype, coded):
    tree = random_tree(length)
    mask = tree.ancestor_mask()
    rows, key, value = case(length, len(tree), dtype)
    found = attend(rows, key, value, length, mask, coded=coded)
    assert near(found, obvious(rows, key, value, length, mask, coded=coded), dtype, coded)
    for node in range(len(tree)):
        path = tree.path(node)
        own = [pairs[:, :, : length + len(path)].clone() for pairs in (key, value)]
        for mine, theirs in zip(own, (key, value), strict=True):
            mine[:, :, length:] = theirs[:, :, [length + at for at in path]]
        alone = attend(rows[node : node + 1], *own, length + len(path) - 1, coded=coded)
        assert torch.equal(alone[0], found[node]), node


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 100, SPLIT - 5, 3000])
def test_a_prompt_in_pieces_of_any_size_and_on_any_number_of_threads_has_the_same_bits(length, dtype, coded):
    new = 2 * SPLIT + 30
    rows, key, value = case(length, new, dtype)
    whole = attend(rows, key, value, length, coded=coded)
    assert near(whole, obvious(rows, key, value, length, coded=coded), dtype, coded)
    for size in (1, 7, 100):
        first = new - 2 * size
        for start in (first, first + size):
            part = attend(rows[start : start + size], key, value, length + start, coded=coded)
            assert torch.equal(part, whole[start : start + size])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(attend(rows, key, value, length, coded=coded), whole)
    finally:
        torch.set_num_threads(threads)


TWO_CHUNKS = LayerKind("two chunks", 96)  # a kind that only the table of kinds would have to know
BOUNDED = [LayerKind("window", 5), LayerKind("window", 100), LayerKind("window", 600), LayerKind("chunk", 96)]


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*BOUNDED, TWO_CHUNKS], ids="{0.name} {0.size}".format)
@pytest.mark.parametrize("length", [0, 3, SPLIT - 2, 2 * SPLIT + 95, 1500])
def test_windows_sinks_and_caps_give_each_token_the_bits_it_has_alone(monkeypatch, length, kind, dtype, coded):
    """In a tree, in a chain and one by one, whatever the cache still holds of what no token sees."""
    monkeypatch.setitem(layout.ATTENDING, TWO_CHUNKS.name, ("two chunks", lambda size: layout.Reach(size, size)))
    tree, sinks = random_tree(length), torch.linspace(-1, 40, 6)
    more = dict(kind=kind, sinks=sinks, softcap=1.5, coded=coded)
    for mask in (tree.ancestor_mask(), None):
        rows, key, value = case(length, len(tree), dtype, spare=0)
        found = attend(rows, key, value, length, mask, **more)
        depths = tree.depths if mask is not None else range(len(tree))
        text = Masked(len(tree), mask, [length + depth for depth in depths])
        wide = (rows[None, :, :6].transpose(1, 2).double(), read(key, coded), read(value, coded))
        expected = masked_softmax(*wide, text.blocked(kind, key), Scores(0.3, kind, sinks.double(), 1.5))
        assert near(found, expected[0].transpose(0, 1).flatten(1), dtype, coded)
        for node in range(len(tree)):
            path = tree.path(node) if mask is not None else list(range(node + 1))
            seen = [*range(length), *(length + at for at in path)]
            seen = seen[kind.first_seen(len(seen) - 1) :]  # the others are not in the cache any more
            own = [pairs[:, :, seen].contiguous() for pairs in (key, value)]
            assert torch.equal(attend(rows[node : node + 1], *own, length + len(path) - 1, **more)[0], found[node])


@needs_native
@pytest.mark.parametrize(
    "heads, kv_heads, dim, value_dim",
    [(4, 4, 8, 8), (8, 1, 40, 24), (48, 1, 64, 64), (3, 3, 256, 96), (8, 2, 512, 512)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_all_shapes(heads, kv_heads, dim, value_dim, dtype, coded):
    tree = random_tree(5)
    rows, key, value = case(300, len(tree), dtype, heads, kv_heads, dim, value_dim)
    found = attend(rows, key, value, 300, tree.ancestor_mask(), heads, coded)
    assert near(found, obvious(rows, key, value, 300, tree.ancestor_mask(), heads, coded), dtype, coded)


@needs_native
def test_texts_of_one_call_have_the_bits_they_have_alone():
    trees = [random_tree(seed, nodes) for seed, nodes in ((1, 1), (2, 9), (3, 16), (4, 2))]
    lengths = (700, 0, 255, 40)
    cases = [case(length, len(tree), torch.float32) for length, tree in zip(lengths, trees, strict=True)]
    new = [NewTokens(length, len(tree), tree.ancestor_mask()) for length, tree in zip(lengths, trees, strict=True)]
    rows, keys, values = zip(*cases, strict=True)
    together = native_attention.native_attention(torch.cat(rows), 6, keys, values, new, Scores(0.3))
    for own, *given, found in zip(rows, keys, values, new, together.split([len(tree) for tree in trees]), strict=True):
        key, value, tokens = given
        assert torch.equal(attend(own, key, value, tokens.length, tokens.mask), found)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("inputs, outputs", [(1, 1), (7, 33), (64, 96), (129, 200)])
def test_products_are_right_and_each_row_stands_alone(inputs, outputs, short, dtype):
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(torch.bfloat16 if short else torch.float32).to(dtype)
    bias, x = torch.randn(outputs).to(dtype), torch.randn(113, inputs).to(dtype)
    kind = NativeWeight if short or dtype == torch.bfloat16 else Fp32Weight
    assert type(pack([weight], [bias])) is kind
    product = kind(weight, bias)
    found = product(x.to(product.dtype))
    assert near(found, x.double() @ weight.double().T + bias.double(), dtype)
    for count in (*range(1, 60), 97):
        assert torch.equal(product(x[-count:].to(product.dtype)), found[-count:])


@needs_native
@pytest.mark.parametrize("place", [0, 6, 7, 8, 255, 256, 32768 + 5])
def test_one_number_that_is_not_bfloat16_is_seen_wherever_it_stands(place):
    torch.manual_seed(0)
    weight = torch.randn(place // 3 + 1, 3).bfloat16().float()
    assert type(pack([weight], [None])) is NativeWeight
    weight.flatten()[place] = 1 + 2**-20
    assert type(pack([weight], [None])) is Fp32Weight


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_may_stand_anywhere_in_memory(dtype):
    torch.manual_seed(0)
    weight, x = torch.randn(40, 22).bfloat16().to(dtype), torch.randn(3, 22)
    expected = x.double() @ weight.double().T
    behind = torch.cat([torch.zeros(1).to(dtype), weight.flatten()])[1:].view(40, 22)
    for given in (weight.T.contiguous().T, behind, torch.cat([weight, weight], 1)[:, 22:]):
        assert type(product := pack([given], [None])) is NativeWeight
        assert near(product(x.to(product.dtype)), expected, torch.bfloat16)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs, outputs", [(7, 33), (64, 96), (128, 200)])
def test_products_for_drafts_have_weights_of_four_bits_where_inputs_are_whole_blocks(inputs, outputs, dtype):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype), torch.randn(130, inputs)
    weight[0], x[3] = 0, 0
    product = pack_for_drafts([weight], [bias])
    rounds = inputs % 32 == 0
    assert (type(product) is QuantisedWeight) == rounds
    if not rounds:
        assert near(product(x.to(product.dtype)), x.double() @ weight.double().T + bias.double(), torch.bfloat16)
        return
    assert product.dtype == torch.float32
    held = gguf_formats.unpacked(rounded(weight, "Q4_1", search=False).numpy(), gguf_formats.FORMATS[3], torch.float64)
    blocks = weight.double().view(outputs, -1, 32)
    # A code is off by half a step at most, of which there are 15 between a block's ends, and these by half precision.
    step = (blocks.amax(2) - blocks.amin(2)) / 15
    assert ((held.view_as(blocks) - blocks).abs() <= 0.51 * step[..., None] + 2e-3 * blocks.abs()).all()
    # Inputs are rounded, too, to half a step of their own part.
    steps = x.view(len(x), -1, 32).abs().amax(2).repeat_interleave(32, 1).double() / 127
    assert ((product(x) - x.double() @ held.T - bias.double()).abs() <= 0.501 * steps @ held.abs().T + 1e-4).all()
    for count in range(1, 60):
        assert torch.equal(product(x[-count:]), product(x)[-count:])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 40, 64, 200])
def test_layers_of_any_width_are_right_and_each_row_stands_alone(width, dtype):
    """Whether or not gate and up end with a panel of weights, so that a thread has the same columns of both."""
    if not native.multiplies(dtype):
        pytest.skip("this processor does not multiply bfloat16")
    model = tiny_llama(dtype, intermediate_size=width)
    for parameter in model.model.layers[0].mlp.parameters():
        parameter.data.mul_(20)  # gates from -90 to 90
    layer, native_layer = model.model.layers[0], Decoder(model).target.backend.whole._held[0]
    hidden = torch.randn(1, 13, model.config.hidden_size).to(dtype)
    attended = torch.zeros(13, model.config.hidden_size, dtype=dtype)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        normed = layer.post_attention_layernorm.double()(hidden.double())
        expected = hidden.double() + layer.mlp.double()(normed)
        try:
            torch.set_num_threads(3)
            found = native_layer.behind_attention(attended, hidden)
            torch.set_num_threads(1)
            alone = [
                native_layer.behind_attention(attended[row : row + 1], hidden[:, row : row + 1]) for row in range(13)
            ]
        finally:
            torch.set_num_threads(threads)
    assert near(found, expected, dtype) and torch.equal(torch.cat(alone, 1), found)


def test_the_text_is_the_same_with_the_library_and_without(prompt, monkeypatch):
    texts = []
    for left_off in (False, True):
        if left_off:
            monkeypatch.setattr(native, "_loaded", lambda: "left off")
        model = tiny_llama(torch.float32)
        dec = Decoder(model, heads=all_heads(model))
        texts += [dec.generate(prompt, 60, method, SAMPLING).token_ids for method in ("ar", "auto", "tokenswift")]
    assert all(text == texts[0] for text in texts)


@pytest.fixture
def kept(monkeypatch):
    """The library of this machine, as the user's cache folder has it."""
    monkeypatch.delenv("TOKENSWIFT_INSTRUCTIONS", raising=False)  # these tests force sets of their own
    native.library()
    file = native.cache_folder() / f"native-{native._key(None)}.so"
    if not file.exists():
        pytest.skip("the library is not kept here")
    return file.read_bytes()


@pytest.fixture
def uncompiled(monkeypatch, tmp_path):
    """The library has not been asked for, and the user's cache folder is empty."""
    monkeypatch.delenv("TOKENSWIFT_INSTRUCTIONS", raising=False)
    monkeypatch.setattr(native, "_loaded_for", native._loaded_for.__wrapped__)
    monkeypatch.setattr(native, "_key", native._key.__wrapped__)
    monkeypatch.setattr(native.compiling, "FLAGS", (*native.compiling.FLAGS, "-O0"))  # half of the compiler's time
    monkeypatch.setattr(native, "_PACKAGE", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def quickly(kept, uncompiled, monkeypatch):
    """The same, with a compiler that has the library in store."""
    monkeypatch.setattr(
        native.compiling, "fault_of_compiling", lambda compiler, made, sets: made.write_bytes(kept) and None
    )
    return uncompiled


def no_compiler(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)


@needs_native
def test_one_that_cannot_be_opened_is_made_again(quickly, monkeypatch):
    """Cut short when the machine went down, say. A name that is open already would be taken for that library."""
    opened, folder = native._opened, quickly / "tokenswift-decoder"
    folder.mkdir(0o700)
    (folder / f"native-{native._key(None)}.so").write_text("cut short")
    assert native.available()
    [made] = folder.iterdir()
    assert len(made.read_bytes()) > 1000 and opened(made)
    no_compiler(monkeypatch)
    monkeypatch.setattr(native, "_opened", lambda file: (_ for _ in ()).throw(OSError("file too short")))
    assert not native.available()


@needs_native
def test_where_there_is_no_place_to_keep_it_it_is_made_for_the_process(quickly, monkeypatch):
    folder = quickly / "tokenswift-decoder"
    folder.write_text("in the way")
    assert native.available()
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    assert native.available() and not list(folder.iterdir()), "anyone could put a library there"
    monkeypatch.setattr(native.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert native.available()


@needs_native
def test_the_second_compiler_is_tried_where_the_first_fails_and_none_is_needed_again(uncompiled, monkeypatch):
    broken, which = uncompiled / "broken-cc", native.shutil.which
    broken.write_text("#!/bin/sh\necho 'error: \xe9 what is a vector' >&2\nexit 1\n", encoding="latin-1")
    broken.chmod(0o755)
    found = {"gcc": str(broken), "cc": which("cc") or which("gcc")}
    monkeypatch.setattr(native.shutil, "which", found.get)
    assert native.available()
    assert len(list((uncompiled / "tokenswift-decoder").iterdir())) == 1
    found["cc"] = None
    with monkeypatch.context() as patch:
        no_compiler(patch)
        assert native.available()
    (native.cache_folder() / f"native-{native._key(None)}.so").unlink()
    assert "broken-cc failed: error: " in native._loaded()


@needs_native
def test_an_instruction_set_can_be_asked_for(monkeypatch):
    [*_, slowest] = native._instruction_sets(None)
    monkeypatch.setenv("TOKENSWIFT_INSTRUCTIONS", slowest)
    assert native.instruction_set() == slowest
    monkeypatch.setenv("TOKENSWIFT_INSTRUCTIONS", "sse9")
    with pytest.raises(native.NativeUnavailable, match=r"INSTRUCTIONS is sse9, and this processor has .*generic"):
        native.library()


@pytest.fixture
def package(kept, monkeypatch, tmp_path):
    """An empty folder that stands for the package's, and a library to put there."""
    monkeypatch.setattr(native, "_loaded_for", cache(native._loaded_for.__wrapped__))
    monkeypatch.setattr(native, "_PACKAGE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path, kept


@needs_native
def test_a_library_that_the_package_brings_needs_no_compiler(package, monkeypatch, recwarn):
    folder, data = package
    no_compiler(monkeypatch)
    (folder / native.compiling.shipped_name(data)).write_bytes(data)
    assert native.library()._name.startswith(str(folder)) and not list(recwarn)
    [fastest, *_], [*_, slowest] = [native._instruction_sets(None)] * 2  # the same one where a processor has one set
    monkeypatch.setenv("TOKENSWIFT_INSTRUCTIONS", fastest)
    assert native.instruction_set() == fastest
    if slowest != fastest:  # which this library does not have
        monkeypatch.setenv("TOKENSWIFT_INSTRUCTIONS", slowest)
        assert native._loaded() == "no C compiler (gcc or cc) is installed"
    assert not list(recwarn)


def of_another_machine(data):
    return data[:18] + (b"\xf3\0" if data[18] != 0xF3 else b"\xb7\0") + data[20:]


@needs_native
@pytest.mark.parametrize(
    "change, named_before, reason",
    [
        (lambda data: data[: len(data) // 2], True, "so is damaged"),
        (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], True, "so is damaged"),
        (lambda data: b"", True, "so is damaged"),
        (of_another_machine, False, "OSError: "),
        (lambda data: b"none", False, "OSError: "),
        ("sources", False, "was made of other source files"),
        ("structures", False, "has other structures than this program: Drafts"),
    ],
    ids=["cut", "a bit", "empty", "machine", "no library", "sources", "structures"],
)
def test_one_that_cannot_be_used_is_told_once_and_the_reference_decodes(
    package, monkeypatch, prompt, change, named_before, reason
):
    folder, data = package
    no_compiler(monkeypatch)
    changed = data if isinstance(change, str) else change(data)
    name = native.compiling.shipped_name(data if named_before else changed)
    if change == "sources":
        name = name.replace(native.compiling.fingerprint(), 16 * "0")
    elif change == "structures":
        monkeypatch.setattr(native, "STRUCTURES", native.STRUCTURES[:-1])
    (folder / name).write_bytes(changed)
    with pytest.warns(UserWarning) as warned:
        dec = Decoder(tiny_llama(torch.float32))
        plain = dec.generate(prompt, 20, "ar", SAMPLING)
        assert dec.generate(prompt, 20, "suffix", SAMPLING).token_ids == plain.token_ids
    [told] = [str(one.message) for one in warned]
    assert told.startswith("the native library of the installed decoder cannot be used: ") and reason in told
    [line] = [line for line in dec.report().splitlines() if line.strip().startswith(NATIVE)]
    assert " off " in line and "no C compiler" in line


@pytest.mark.parametrize(
    "machine, told, sets",
    [
        ("arm64", {"hw.optional.arm.FEAT_I8MM": "1"}, ["i8mm", "neon", "generic"]),
        ("arm64", {}, ["neon", "generic"]),
        (
            "x86_64",
            {"machdep.cpu.features": "FMA AVX1.0 F16C", "machdep.cpu.leaf7_features": "BMI1 AVX2 BMI2"},
            ["avx2"],
        ),
    ],
)
def test_on_a_mac_its_system_tells_what_the_processor_can_do(machine, told, sets, monkeypatch):
    """As `sysctl` prints it there. No Mac has run this."""

    def run(command, **given):
        assert command[:2] == ["sysctl", "-n"]
        return subprocess.CompletedProcess(command, 0, "\n".join(told.get(name, "") for name in command[2:]))

    monkeypatch.setattr(native.sys, "platform", "darwin")
    monkeypatch.setattr(native.compiling.platform, "machine", lambda: machine)
    monkeypatch.setattr(native.subprocess, "run", run)
    assert native._instruction_sets(None) == sets
    assert native._instruction_sets(sets[-1]) == sets[-1:]
    with pytest.raises(native.NativeUnavailable, match="TOKENSWIFT_INSTRUCTIONS is avx512"):
        native._instruction_sets("avx512")


@pytest.mark.parametrize(
    "what, reason",
    [
        ("no compiler", "no C compiler (gcc or cc) is installed"),
        ("another machine", "for Linux and macOS on x86_64 or aarch64, not linux on riscv64"),
        ("old processor", "the processor has no AVX2"),
        ("broken compiler", "failed: "),
        ("full disk", "it could not be made: OSError: no space left"),
    ],
)
def test_where_it_cannot_be_had_pytorch_does_all_and_the_report_says_why(uncompiled, monkeypatch, prompt, what, reason):
    if what == "no compiler":
        no_compiler(monkeypatch)
    elif what == "another machine":
        monkeypatch.setattr(native.compiling.platform, "machine", lambda: "riscv64")
    elif what == "old processor":
        monkeypatch.setattr(native, "_processor", lambda: {"sse2", "fma"})
    elif what == "broken compiler":
        if native.shutil.which("gcc") is None:
            pytest.skip("there is no compiler")
        monkeypatch.setattr(native.compiling, "FLAGS", ("--no-such-flag",))
    else:

        def full(**given):
            raise OSError("no space left")

        monkeypatch.setattr(native.tempfile, "TemporaryDirectory", full)
        monkeypatch.setattr(native.shutil, "which", lambda name: "/usr/bin/gcc")
    assert not native.available() and native.library_name() is None
    dec = Decoder(tiny_llama(torch.float32))
    [line] = [line for line in dec.report().splitlines() if line.strip().startswith(NATIVE)]
    assert " off " in line and reason in line
    plain = dec.generate(prompt, 20, "ar", SAMPLING)
    assert dec.generate(prompt, 20, "suffix", SAMPLING).token_ids == plain.token_ids


def test_a_dtype_is_chosen_that_is_fast_and_lossless(tmp_path, monkeypatch):
    """bfloat16 where the checkpoint has it and the library multiplies it, unless rounding could change the text."""
    monkeypatch.setattr("decoder.loader.read_tokenizer", lambda *given, **others: None)
    for dtype in DTYPES:
        tiny_llama(dtype).save_pretrained(tmp_path / str(dtype))
    short, wide = (str(tmp_path / str(dtype)) for dtype in (torch.bfloat16, torch.float32))
    own = torch.bfloat16 if native.multiplies(torch.bfloat16) else torch.float32
    assert decoder.load(short).model.dtype == own
    assert decoder.load(wide).model.dtype == torch.float32
    assert decoder.load(short, bitwise=False).model.dtype == torch.float32
    monkeypatch.setattr("decoder.backends.bitwise_check.model_fault", lambda target: "its sums are shuffled")
    dec = decoder.load(short, random_heads(tiny_llama(torch.float32)))
    assert not dec.bitwise and dec.model.dtype == torch.float32
    monkeypatch.setattr(native, "_loaded", lambda: "left off")
    assert decoder.load(short).model.dtype == torch.float32


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_token_does_not_see_may_be_no_number(dtype, coded):
    """A later token of the same piece of a prompt, whose weight of zero would not hide it."""
    rows, key, value = case(100, 9, dtype)
    whole = attend(rows, key, value, 100, coded=coded)
    for number in (torch.nan, torch.inf):
        key[:, :, 105], value[:, :, 105] = number, number
        found = attend(rows, key, value, 100, coded=coded)
        assert torch.equal(found[:5], whole[:5]) and not found[5:].isfinite().any()


@needs_native
def test_a_forked_process_shares_work_among_threads_of_its_own():
    """And so does a process that it forks; threads that come and go keep their bits."""
    threads = torch.get_num_threads()
    rows, key, value = case(700, 9, torch.float32)

    def child(generations):
        if not generations:
            return
        one = multiprocessing.get_context("fork").Process(target=check, args=(generations - 1,))
        one.start()
        one.join(60)
        assert one.exitcode == 0

    def check(generations):
        assert torch.equal(attend(rows, key, value, 700), whole)
        child(generations)

    try:
        torch.set_num_threads(3)
        whole = attend(rows, key, value, 700)
        child(2)
        assert torch.equal(attend(rows, key, value, 700), whole)
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_several_threads_may_call_at_once():
    """One of them has the pool, the others run alone; ctypes lets go of the interpreter's lock meanwhile."""
    threads, cases = torch.get_num_threads(), [case(700 + 90 * n, 9, torch.float32) for n in range(4)]

    def found(number, times):
        return [attend(*cases[number], 700 + 90 * number) for _ in range(times)]

    try:
        torch.set_num_threads(1)
        alone = [found(number, 1)[0] for number in range(4)]
        torch.set_num_threads(3)
        with ThreadPoolExecutor(4) as callers:
            each = list(callers.map(found, range(4), [50] * 4, timeout=60))
    finally:
        torch.set_num_threads(threads)
    for whole, all_of_it in zip(alone, each, strict=True):
        assert all(torch.equal(one, whole) for one in all_of_it)


@needs_native
@pytest.mark.parametrize("others", DTYPES, ids=["float32", "bfloat16"])
def test_layers_whose_parts_have_several_dtypes(prompt, others):
    """Norms in float32 beside products in bfloat16, or an embedding in another dtype than the layers."""
    mixed = tiny_llama(torch.bfloat16)
    if others == torch.float32:
        for module in mixed.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.float()
    else:
        mixed = tiny_llama(torch.float32)
        mixed.model.embed_tokens.bfloat16()
    whole = tiny_llama(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # roundings to bfloat16 are no fault of the library's
        dec, plain = Decoder(mixed, bitwise=False), Decoder(whole, bitwise=False)
    caches = []
    for one in (dec, plain):
        caches.append(FullCache(len(prompt) + 1))
        with torch.inference_mode(), one.target.patched():
            one.target.prefill(prompt[:-1], caches[-1])
            [seen] = one.target.forward([TokenTree(prompt[-1])], [caches[-1]])
            caches[-1] = seen.logits.double()
    assert (caches[0] - caches[1]).norm() <= 0.05 * caches[1].norm()


@needs_native
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_another_default_dtype_changes_nothing(prompt, default):
    expected = Decoder(tiny_llama(torch.float32)).generate(prompt, 40, "ar", SAMPLING).token_ids
    model, heads = tiny_llama(torch.float32), random_heads(tiny_llama(torch.float32), kind="gated")
    torch.set_default_dtype(default)
    try:
        dec = Decoder(model, heads=heads)
        assert dec.target.backend.name == NATIVE
        for method in ("ar", "auto"):
            assert dec.generate(prompt, 40, method, SAMPLING).token_ids == expected
    finally:
        torch.set_default_dtype(torch.float32)


@needs_native
def test_what_a_hook_has_kept_of_the_embeddings_stays_as_it_was(prompt):
    model, kept = tiny_llama(torch.float32), []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: kept.append((output, output.clone())))
    Decoder(model).generate(prompt, 10, "ar", SAMPLING)
    assert len(kept) > 10 and all(torch.equal(*pair) for pair in kept)


@needs_native
@pytest.mark.parametrize("kind", ["dtype", "layout"])
def test_a_pass_does_not_write_to_buffers_of_another_form(prompt, kind):
    """As they are where a part of the text was decoded under autocast, or as several texts of another dtype."""
    dec = Decoder(tiny_llama(torch.float32))
    dec.generate(prompt, 4, "ar")
    whole = dec.target.backend.whole
    cache = FullCache(20)
    cache.prepare(Layout.of_full(2))
    pair = torch.zeros(1, 2, 0, 8, dtype=torch.bfloat16 if kind == "dtype" else torch.float32)
    assert whole.writes(cache)
    cache.make_ready(3, pair, pair)
    assert whole.writes(cache) == (kind != "dtype")
    cache.keys = cache.keys.transpose(3, 4).contiguous().transpose(3, 4)
    assert not whole.writes(cache)
