"""The reference model as a GGUF file in each of the formats that the native library multiplies.

    python data/scripts/reference_gguf.py FOLDER

FOLDER gets a file per format, such as Q4_K.gguf, and `heads`, the independent heads, for comparisons of all methods in
each format (`packages/decoder/benchmarks/bitwise.py same`). The K formats have blocks of 256 numbers, so the model's
rows of 384 become 512: what is added are zeros, and norms are scaled to what they were. ggml itself rounds the weights,
so the package llama-cpp-python must be installed, beside gguf.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

DATA = Path(__file__).parent.parent
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers.": "blk.",
}  # fmt: skip
WIDTH = 512  # of a row
_NORMAL, _CONTROL = 1, 3  # llama.cpp's types of tokens


def ggml() -> ctypes.CDLL:
    """The library of llama-cpp-python that rounds weights."""
    package = find_spec("llama_cpp")
    if package is None or package.origin is None:
        raise SystemExit("install llama-cpp-python, whose ggml rounds the weights")
    library = ctypes.CDLL(str(next((Path(package.origin).parent / "lib").glob("libggml-base.*"))))
    library.ggml_quantize_chunk.argtypes = (
        ctypes.c_int,
        *2 * [ctypes.c_void_p],
        *3 * [ctypes.c_int64],
        ctypes.c_void_p,
    )
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def wider(numbers: torch.Tensor, dimension: int) -> torch.Tensor:
    """Zeros behind the numbers of a dimension, to `WIDTH`."""
    sizes = list(numbers.shape)
    sizes[dimension] = WIDTH - sizes[dimension]
    return torch.cat([numbers, numbers.new_zeros(sizes)], dimension)


def norm(weight: torch.Tensor) -> torch.Tensor:
    """A norm's weights where a row is longer by zeros, which lower the mean of the squares."""
    return wider(weight * (len(weight) / WIDTH) ** 0.5, 0)


def more_heads(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Query heads of zeros behind those of each group; ``rows`` are [groups * heads * size, ...]."""
    grouped = rows.unflatten(0, (groups, -1))
    added = WIDTH // groups - grouped.shape[1]
    return torch.cat([grouped, grouped.new_zeros(groups, added, *grouped.shape[2:])], 1).flatten(0, 1)


def in_pairs(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of a query or key matrix in llama.cpp's order: the halves of a rotary pair side by side."""
    return rows.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What the file holds, by its names there."""
    size, groups = model.config.head_dim, model.config.num_key_value_heads
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        short = name
        for theirs, ours in NAMES.items():
            short = short.replace(theirs, ours)
        if weight.ndim == 1:
            yield short, norm(weight)
            continue
        if short.endswith("attn_q.weight"):
            weight = in_pairs(more_heads(weight, groups), size)
        elif short.endswith("attn_k.weight"):
            weight = in_pairs(weight, size)
        elif short.endswith("attn_output.weight"):
            weight = more_heads(weight.T, groups).T
        for dimension in (0, 1):
            if weight.shape[dimension] == model.config.hidden_size:
                weight = wider(weight, dimension)
        yield short, weight


def write(file: Path, model: torch.nn.Module, kind: gguf.GGMLQuantizationType, library: ctypes.CDLL | None) -> None:
    """The model with its matrices in a format, to which ``library`` rounds them; F32 needs none."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(f"reference model, {kind.name}")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(WIDTH // config.head_dim)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps * config.hidden_size / WIDTH)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = json.loads((DATA / "reference-model" / "tokenizer.json").read_text("utf-8"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    control = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in control else _NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(False)
    for name, weight in tensors(model):
        numbers = np.ascontiguousarray(weight.float().numpy())
        if weight.ndim == 1 or library is None:
            writer.add_tensor(name, numbers)
            continue
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        rows, columns = numbers.shape
        rounded = np.empty((rows, columns // elements * size), dtype=np.uint8)
        made = library.ggml_quantize_chunk(kind.value, numbers.ctypes.data, rounded.ctypes.data, 0, rows, columns, None)
        assert made == rounded.nbytes, (kind, name)
        writer.add_tensor(name, rounded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_heads(folder: Path) -> None:
    """The independent heads, for rows of `WIDTH`."""
    folder.mkdir(exist_ok=True)
    source = DATA / "heads-independent"
    config = json.loads((source / "config.json").read_text())
    config["norm_eps"] *= config["hidden_size"] / WIDTH
    config["hidden_size"] = WIDTH
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = load_file(source / "heads.safetensors")
    save_file(
        {name: norm(one) if one.ndim == 1 else wider(wider(one, 0), 1).contiguous() for name, one in weights.items()},
        folder / "heads.safetensors",
    )


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("use: python data/scripts/reference_gguf.py FOLDER")
    folder, library = Path(sys.argv[1]), ggml()
    folder.mkdir(parents=True, exist_ok=True)
    write_heads(folder / "heads")
    model = AutoModelForCausalLM.from_pretrained(DATA / "reference-model", dtype=torch.float32)
    for name in FORMATS:
        write(folder / f"{name}.gguf", model, gguf.GGMLQuantizationType[name], None if name == "F32" else library)
        print(folder / f"{name}.gguf", flush=True)


if __name__ == "__main__":
    main()
