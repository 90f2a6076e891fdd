"""A GGUF file's model in the file's own formats: its numbers, its bits, and its texts."""

from contextlib import nullcontext

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from decoder.backends.native import library as native

gguf = pytest.importorskip("gguf")
if not native.available():
    pytest.skip("needs the native library", allow_module_level=True)

import decoder  # noqa: E402
from decoder.backends.native.quantised import QuantisedEmbedding, QuantisedLinear, QuantisedWeight  # noqa: E402
from decoder.cache.full import FullCache  # noqa: E402
from decoder.model.gguf.ahead import packing_ahead  # noqa: E402
from decoder.model.gguf.file import GgufFile  # noqa: E402
from decoder.sampling.token_tree import TokenTree  # noqa: E402
from tests.decoder.test_gguf import finish  # noqa: E402
from tests.decoder.test_quantised import NAMES, blocks_of, dequantised  # noqa: E402

SIZE, WIDTH, VOCABULARY, LAYERS = 256, 512, 320, 2
HEADS, KV_HEADS = 4, 2
TOKENS = [chr(0x100 + i) for i in range(VOCABULARY)]
TOKENS[-1] = TOKENS[0] * 2  # what its merge makes
# Of the layers' matrices; others are of the format that is tested.
SHAPES = {
    "attn_q": (SIZE, SIZE),
    "attn_k": (SIZE // 2, SIZE),
    "attn_v": (SIZE // 2, SIZE),
    "attn_output": (SIZE, SIZE),
    "ffn_gate": (WIDTH, SIZE),
    "ffn_up": (WIDTH, SIZE),
    "ffn_down": (SIZE, WIDTH),
}
MIXED = {"attn_v": "Q8_0", "ffn_up": "Q5_0", "ffn_down": "Q6_K"}


def write(path, name, head=None, architecture="qwen2"):
    """A small file of random blocks of a format, with values and some others in the formats of `MIXED`."""
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in (
        (writer.add_block_count, LAYERS), (writer.add_context_length, 1024), (writer.add_embedding_length, SIZE),
        (writer.add_feed_forward_length, WIDTH), (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV_HEADS),
        (writer.add_rope_freq_base, 10000.0), (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_tokenizer_model, "gpt2"), (writer.add_tokenizer_pre, "qwen2"),
        (writer.add_token_list, TOKENS),
        (writer.add_token_types, [1] * VOCABULARY), (writer.add_token_merges, [" ".join(TOKENS[-1])]),
        (writer.add_eos_token_id, 1),
    ):  # fmt: skip
        add(value)

    def matrix(tensor, shape, kind, seed):
        blocks = blocks_of(kind, *shape, seed=seed)
        writer.add_tensor(f"{tensor}.weight", blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])

    random = torch.Generator().manual_seed(3)
    matrix("token_embd", (VOCABULARY, SIZE), name, 1)
    if head:
        matrix("output", (VOCABULARY, SIZE), head, 2)
    writer.add_tensor("output_norm.weight", (0.05 + torch.rand(SIZE, generator=random) / 10).numpy())
    for layer in range(LAYERS):
        for seed, (tensor, shape) in enumerate(SHAPES.items()):
            matrix(f"blk.{layer}.{tensor}", shape, MIXED.get(tensor, name), 10 * layer + seed)
            if architecture == "qwen2" and tensor in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"blk.{layer}.{tensor}.bias", torch.randn(shape[0], generator=random).numpy())
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", (torch.rand(SIZE, generator=random) / 4).numpy())
    finish(writer)
    return path


@pytest.fixture(scope="module", params=NAMES)
def loaded(request, tmp_path_factory):
    """The path of a file, whose head is the embeddings, and its decoder."""
    path = write(tmp_path_factory.mktemp("quantised") / "tiny.gguf", request.param)
    return path, request.param, decoder.load(path)


def test_matrices_stay_in_the_formats_of_the_file(loaded):
    _, name, dec = loaded
    embeddings, head = dec.model.get_input_embeddings(), dec.model.get_output_embeddings()
    assert isinstance(embeddings, QuantisedEmbedding)
    assert head.weight is embeddings.weight  # once in memory
    expected = dequantised(name, blocks_of(name, VOCABULARY, SIZE, 1))
    assert torch.equal(embeddings.rows(torch.arange(VOCABULARY)).double(), expected)
    kinds = {
        path: module.kind.name for path, module in dec.model.named_modules() if isinstance(module, QuantisedLinear)
    }
    assert len(kinds) == LAYERS * 7 + 1
    assert kinds["model.layers.1.self_attn.q_proj"] == kinds["lm_head"] == name
    assert kinds["model.layers.1.self_attn.v_proj"] == "Q8_0"
    backend = dec.target.backend
    assert backend.whole is not None  # all layers in one call
    assert set(backend._kinds()) == {QuantisedWeight.__name__.removesuffix("Weight")}
    assert "in gguf" in dec.report()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_pages_of_the_file_are_given_back_as_its_matrices_are_packed(tmp_path, monkeypatch, ahead):
    path, released, release = write(tmp_path / "tiny.gguf", "Q4_K"), set(), GgufFile.release
    monkeypatch.setattr(GgufFile, "release", lambda file, name=None: (released.add(name), release(file, name)))
    with packing_ahead(path) if ahead else nullcontext():
        decoder.load(path)
    assert released == {*GgufFile.read(path).tensors, None}  # and the rest of the file


def test_embeddings_are_scaled_as_gemma_scales_them(loaded):
    """By a factor in the model's dtype, behind the rounding of the row."""
    matrix, ids = loaded[2].model.get_input_embeddings().matrix, torch.arange(VOCABULARY)
    own = Gemma3TextScaledWordEmbedding(VOCABULARY, SIZE, None, embed_scale=SIZE**0.5)
    for dtype in (torch.float32, torch.bfloat16):
        own.weight = torch.nn.Parameter(matrix.rows(ids).to(dtype))
        assert torch.equal(QuantisedEmbedding(matrix, dtype, SIZE**0.5)(ids), own(ids))


def test_logits_are_those_of_unpacked_weights_up_to_the_rounding_of_inputs(loaded):
    path, _, dec = loaded
    unpacked = decoder.load(path, dtype="float64")
    assert not any(isinstance(module, QuantisedLinear) for module in unpacked.model.modules())
    ids = torch.randint(VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))
    expected = unpacked.model(ids).logits[0]
    cache = FullCache(64)
    with torch.inference_mode(), dec.target.patched():
        dec.target.prefill(ids[0].tolist()[:-1], cache)
        logits = dec.target.forward([TokenTree(int(ids[0, -1]))], [cache])[0].logits
    error = (logits[0].double() - expected[-1]).norm() / expected[-1].norm()
    assert 1e-5 < error < 0.05
    assert decoder.load(path, dtype="bfloat16").model.dtype == torch.bfloat16


def test_the_same_bits_alone_and_among_others(loaded):
    """A text's log-probabilities are those of plain decoding to the last bit, whatever drafts are verified."""
    _, _, dec = loaded
    assert dec.bitwise
    prompt = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(2)).tolist() * 3
    sampling = decoder.SamplingParams(temperature=0.7, seed=4)
    given = dict(max_new_tokens=60, sampling=sampling, ignore_eos=True, return_logprobs=True)
    plain = dec.generate(prompt, method="ar", **given)
    for method in ("prompt-lookup", "magicdec"):
        out = dec.generate(prompt, method=method, **given)
        assert out.token_ids == plain.token_ids
        assert out.logprobs == plain.logprobs
    batch = dec.generate_batch([prompt, prompt[:50]], method="ar", **given)
    assert batch[0].token_ids == plain.token_ids
    assert batch[0].logprobs == plain.logprobs


def test_a_head_of_its_own_and_rotary_pairs(tmp_path):
    path = write(tmp_path / "tiny.gguf", "Q4_K", head="Q6_K", architecture="llama")
    dec, unpacked = decoder.load(path), decoder.load(path, dtype="float64")
    head = dec.model.get_output_embeddings()
    assert (head.kind.name, dec.model.get_input_embeddings().kind.name) == ("Q6_K", "Q4_K")
    ids = torch.randint(VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))
    one, other = dec.model(ids).logits.double(), unpacked.model(ids).logits
    assert 1e-5 < (one - other).norm() / other.norm() < 0.05


def test_draft_heads_of_some_tokens_read_rows_of_the_quantised_head(tmp_path):
    path = write(tmp_path / "tiny.gguf", "Q5_0")
    heads = decoder.DraftHeads(SIZE, 2)
    heads.draft_to_target = torch.arange(0, VOCABULARY, 5)
    dec = decoder.load(path, heads)
    given = dict(max_new_tokens=30, sampling=decoder.SamplingParams(seed=1), ignore_eos=True)
    prompt = list(range(3, 90))
    assert (
        dec.generate(prompt, method="tokenswift", **given).token_ids
        == dec.generate(prompt, method="ar", **given).token_ids
    )


def test_scales_that_are_no_numbers_are_refused(tmp_path, monkeypatch):
    blocks = blocks_of("Q4_K", SIZE // 2, SIZE)
    blocks[77, 0:2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    monkeypatch.setitem(MIXED, "attn_k", "Q4_K")
    own = blocks_of

    def damaged(name, outputs, inputs=SIZE, seed=0):
        return blocks if (name, outputs) == ("Q4_K", SIZE // 2) else own(name, outputs, inputs, seed)

    monkeypatch.setattr("tests.decoder.test_quantised_model.blocks_of", damaged)
    path = write(tmp_path / "tiny.gguf", "Q8_0")
    with pytest.raises(ValueError, match=r"holds values in blk\.0\.attn_k\.weight that are no numbers: fetch it again"):
        decoder.load(path)
