"""Models in a GGUF file are the models of their Hugging Face folders, and what cannot be read is told in a sentence."""

import json
import sys

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import decoder
from decoder.model.gguf import formats
from decoder.model.gguf.file import GgufFile

from ..tiny import LETTERS, byte_level, joined

CHAT = "{% for m in messages %}<|a|>{{ m['content'] }}<|b|>{% endfor %}"
# Byte letters, the tokens between turns, and what merges make.
SPECIAL = ["<|a|>", "<|b|>", "<|c|>"]
MERGES = [("Ċ", "Ċ"), ("Ġ", "t"), ("1", "2"), ("h", "e"), ("Ġt", "he")]


def vocabulary():
    tokens = SPECIAL + LETTERS + joined(MERGES)
    return tokens + [f"unused{i}" for i in range(-len(tokens) % 32)]


SIZES = dict(
    vocab_size=len(vocabulary()),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def published_tokenizer():
    """As SmolLM2's tokenizer.json has it: digits stand alone before the byte level splits."""
    tokenizer = byte_level(vocabulary(), MERGES)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|b|>", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def hf_model():
    torch.manual_seed(5)
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    others = dict(max_position_embeddings=512, rms_norm_eps=1e-5, rope_parameters=rope, tie_word_embeddings=True)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **others, bos_token_id=None, eos_token_id=[1, 2])).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def permuted(weight, heads):
    """Rows of a query or key matrix in llama.cpp's order, where the two halves of a rotary pair stand side by side."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def add_tokenizer(writer, pre):
    """The fields of `published_tokenizer`, without its end tokens."""
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])


def finish(writer):
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path, model, kind=gguf.GGMLQuantizationType.F32, pre="smollm", architecture="llama", more=()):
    """Write ``model`` as llama.cpp's converter does, matrices as ``kind``; returns the weights that are then in it."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    add_tokenizer(writer, pre)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template(CHAT)
    for key, value in more:
        writer.add_string(key, value)
    stored = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        ours = name.removeprefix("model.").removesuffix(".weight")
        for theirs, short in (
            ("layers.", "blk."), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("post_attention_layernorm", "ffn_norm"),
            ("input_layernorm", "attn_norm"), ("embed_tokens", "token_embd"),
        ):  # fmt: skip
            ours = ours.replace(theirs, short)
        ours = "output_norm" if ours == "norm" else ours
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(ours.split(".")[-1])
        rows = tensor if heads is None else permuted(tensor, heads)
        if tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{ours}.weight", rows.numpy())
            stored[name] = tensor
            continue
        blocks = gguf.quantize(rows.numpy(), kind)
        writer.add_tensor(f"{ours}.weight", blocks, raw_dtype=kind)
        back = torch.from_numpy(gguf.dequantize(blocks, kind).copy())
        if heads is not None:
            back = back.view(heads, -1, 2, back.shape[-1]).transpose(1, 2).reshape(back.shape)
        stored[name] = back
    finish(writer)
    return stored


@pytest.fixture(scope="module")
def plain_file(hf_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, hf_model)
    return path


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_logits_are_those_of_the_same_weights_in_a_hugging_face_model(hf_model, tmp_path, kind):
    stored = write_gguf(tmp_path / "tiny.gguf", hf_model, gguf.GGMLQuantizationType[kind])
    same = LlamaForCausalLM(hf_model.config).eval()
    same.load_state_dict(stored, strict=False)
    same.tie_weights()
    dec = decoder.load(tmp_path / "tiny.gguf", dtype="float32")
    assert dec.model.dtype == torch.float32
    ids = torch.randint(len(vocabulary()), (1, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(dec.model(ids).logits, same(ids).logits, rtol=0, atol=1e-5)


def test_a_text_is_the_folders_text(hf_model, plain_file, tmp_path):
    hf_model.save_pretrained(tmp_path)
    published_tokenizer().save_pretrained(tmp_path)
    one, other = decoder.load(plain_file, dtype="float64"), decoder.load(tmp_path, dtype="float64")
    for method in ("ar", "prompt-lookup"):
        assert (
            one.generate("the 12\n\n12", 40, method, ignore_eos=True).token_ids
            == other.generate("the 12\n\n12", 40, "ar", ignore_eos=True).token_ids
        )


def test_bfloat16_where_it_is_asked_for(plain_file):
    assert decoder.load(plain_file, dtype="bfloat16").model.dtype == torch.bfloat16


def test_four_bits_are_those_of_the_file(hf_model, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", hf_model, gguf.GGMLQuantizationType.Q4_1)
    dec, short = (decoder.load(tmp_path / "tiny.gguf", dtype=dtype) for dtype in ("float32", "int4"))
    layer, own = (one.model.model.layers[1].mlp.up_proj for one in (short, dec))
    assert torch.allclose(layer.rows(torch.arange(layer.out_features)), own.weight, rtol=2**-9, atol=1e-5)
    # Rounding is that of inputs, as the codes are the file's.
    ids = torch.randint(len(vocabulary()), (1, 40), generator=torch.Generator().manual_seed(1))
    one, other = short.model(ids).logits, dec.model(ids).logits
    assert 0 < (one - other).norm() < 0.03 * other.norm()


def test_digits_stand_alone_before_the_rest_is_split(plain_file):
    published, read = published_tokenizer(), decoder.load(plain_file).tokenizer
    for text in ("\n\n12", "the the 1212\n\n the", "he<|b|>12"):
        assert read(text)["input_ids"] == published(text)["input_ids"]
    assert read.tokenize("\n\n12") == ["ĊĊ", "1", "2"]


def test_chat_template_and_every_end_token_come_along(plain_file):
    dec = decoder.load(plain_file)
    assert dec.tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "<|a|>he<|b|>"
    assert dec.tokenizer.eos_token_id == 1
    assert dec.model.generation_config.eos_token_id == [1, 2]


def test_numbers_are_those_of_the_published_configuration(plain_file):
    # A file holds float32: 1e-05 comes back as 9.999999747378752e-06.
    assert decoder.load(plain_file).model.config.rms_norm_eps == 1e-5


def test_the_model_is_saved_as_any_other(plain_file, tmp_path):
    dec = decoder.load(plain_file, dtype="bfloat16")
    dec.model.save_pretrained(tmp_path)
    dec.tokenizer.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, dec.model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path)("\n\n12")["input_ids"] == dec.tokenizer("\n\n12")["input_ids"]


def refused(path, words):
    with pytest.raises((OSError, ValueError)) as caught:
        decoder.load(path)
    message = str(caught.value)
    assert str(path) in message and words in message and "\n" not in message


def test_what_cannot_be_read_is_told_in_a_sentence(hf_model, plain_file, tmp_path):
    whole = plain_file.read_bytes()
    path = tmp_path / "bad.gguf"
    refused(path, "there is no model file")
    for length in (2_000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        refused(path, "cut short: fetch it again")
    path.write_bytes(b"PK\3\4" + whole)
    refused(path, "no GGUF file")
    write_gguf(path, hf_model, architecture="rwkv9")
    refused(path, "architecture rwkv9 cannot be read")
    write_gguf(path, hf_model, pre="superbpe")
    refused(path, "pre-tokenizer 'superbpe'")
    write_gguf(path, hf_model, more=[("llama.rope.scaling.type", "longrope")])
    refused(path, "rotary embeddings")


def test_what_transformers_would_read_wrongly_is_refused(hf_model, plain_file, tmp_path):
    whole, path = plain_file.read_bytes(), tmp_path / "bad.gguf"

    def changed(key, value):
        """With another 32-bit number behind a key and its type."""
        at = whole.index(key) + len(key) + 4
        path.write_bytes(whole[:at] + np.uint32(value).tobytes() + whole[at + 4 :])

    for key in (b"llama.block_count", b"llama.context_length", b"llama.attention.head_count"):
        changed(key, 0)
        refused(path, "is 0: give the model's Hugging Face folder")
    changed(b"llama.block_count", 1)
    refused(path, "says 1 layers and has weights of 2")
    changed(b"tokenizer.ggml.eos_token_id", 10**6)
    refused(path, "ends texts with token 1000000 of")
    # The type of a tensor tells how many bytes it has, so the next one would begin elsewhere.
    name = b"blk.0.attn_q.weight"
    changed(name, 0)
    at = whole.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(whole[:at] + np.uint32(gguf.GGMLQuantizationType.Q8_0).tobytes() + whole[at + 4 :])
    refused(path, "is not where it should be: fetch it again")
    header = GgufFile.read(plain_file)
    at = header.data_start + header.tensors["output_norm.weight"].offset
    path.write_bytes(whole[:at] + np.float32(np.nan).tobytes() + whole[at + 4 :])
    refused(path, "no numbers: fetch it again")


def test_an_ending_in_capitals_is_one_as_well(plain_file, tmp_path):
    path = tmp_path / "MODEL.GGUF"
    path.write_bytes(plain_file.read_bytes())
    assert decoder.load(path).model.config.vocab_size == len(vocabulary())


def test_a_quantisation_that_nobody_unpacks_is_refused(plain_file, tmp_path):
    header = GgufFile.read(plain_file)
    content = bytearray(plain_file.read_bytes())
    # The number of a tensor's type stands behind its name, its number of axes and its sizes.
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    assert content[at : at + 4] == np.uint32(0).tobytes() and "blk.0.attn_q.weight" in header.tensors
    for number, named in ((29, "IQ1_M"), (4_000, "4000")):
        content[at : at + 4] = np.uint32(number).tobytes()
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        try:
            gguf.dequantize(np.zeros((1, 56), np.uint8), gguf.GGMLQuantizationType(number))
        except (ValueError, NotImplementedError):
            refused(path, f"quantisation {named}")


def test_the_missing_package_is_named(plain_file, tmp_path, monkeypatch):
    """Only formats that need large tables need the package gguf."""
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert decoder.load(plain_file).model.config.vocab_size == len(vocabulary())
    path = tmp_path / "rare.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", np.zeros((1, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    finish(writer)
    refused(path, "pip install gguf")
