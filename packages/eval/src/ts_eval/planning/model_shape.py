"""What of a model decides its bytes, read from its configuration alone or from the loaded model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig

from decoder.parts import (
    DTYPES,
    QUANTISED_DTYPES,
    CacheForm,
    dtype_around,
    empty_model,
    is_gguf,
    layer_configs,
    layer_kinds,
    loading,
    meant,
    parse_json,
    quantised_bytes,
    refuse_unshareable,
    shared_parameters,
    window_slots,
)
from ts_eval.comparing.checkpoints import named, refuse_missing

CONFIGS = Path(__file__).parent / "configs"
"""Configurations of published models as far as they decide shapes, by name: llama-3.1-8b and others."""
CUDA = torch.device("cuda")
_PASS = 512  # tokens of a prompt in a pass, for which windows have room


class Window(NamedTuple):
    """A layer that keeps a window or a chunk of the text: so many slots of keys and values of its own heads."""

    slots: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its bytes.

    Attributes:
        parameters: all of them, tied ones once; what is held in fewer bytes counts as so many fewer numbers.
        read_parameters: those that one pass reads: all but an input embedding of its own, of which it takes a row.
        lm_head_parameters: the language-model head's.
        layers: those that attend to the text, and so keep something of each token.
        kv_heads, head_dim, hidden_size, vocab_size: as in the configuration; heads of layers that attend to all.
        value_bytes: of one number.
        windows: the layers that do not.
        shared_parameters: those of which each of several processes would hold a part.
    """

    parameters: int
    read_parameters: int
    lm_head_parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    value_bytes: int
    shared_parameters: int = 0
    windows: tuple[Window, ...] = ()

    @classmethod
    def of(cls, model, dtype: torch.dtype | None = None, rounded: str | None = None) -> "ModelShape":
        """Of a loaded model, or of one on the meta device.

        ``dtype`` is what it shall be held in if that is another, and ``rounded`` that of its linear layers' weights.
        """
        config = model.config.get_text_config()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        head_name = next(name for name, one in model.named_modules() if one is model.get_output_embeddings())
        quantised = getattr(model.get_output_embeddings(), "shape", None)  # whose weights are bytes in another order
        value_bytes = (dtype or (model.dtype if quantised else head.dtype)).itemsize

        def values(weight: torch.Tensor) -> int:
            return weight.numel() if weight.is_floating_point() else weight.nbytes // value_bytes

        sizes = {name: one.numel() if dtype else one.nbytes // value_bytes for name, one in model.named_parameters()}
        shorter = {name: size // value_bytes for name, size in quantised_bytes(model, rounded).items()}
        # A head that is made shorter is no longer the embedding.
        tied, head_values = head is embedding and not shorter, shorter.get(f"{head_name}.weight", values(head))
        sizes |= shorter
        parameters = sum(sizes.values())
        kinds, layers = layer_kinds(config), layer_configs(config)
        if len(layers) < len(kinds):
            layers = layers * len(kinds)
        kv_heads, head_dim = _kept_heads(layers[-1])  # which attends to all where they differ
        return cls(
            parameters=parameters,
            read_parameters=parameters - (0 if tied else values(embedding)),
            lm_head_parameters=head_values,
            layers=sum(kind.attends for kind in kinds),
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=config.hidden_size,
            vocab_size=(quantised or head.shape)[0],
            value_bytes=value_bytes,
            shared_parameters=sum(sizes[name] for name in shared_parameters(sizes, model.tp_plan or {})),
            windows=tuple(
                Window(window_slots(kind, _PASS, None), *_kept_heads(layer))
                for kind, layer in zip(kinds, layers, strict=True)
                if kind.size
            ),
        )

    def shared(self, size: int) -> "ModelShape":
        """What one of ``size`` processes holds under transformers' plan; drafters and logits are whole in each."""

        def share(numbers: int) -> int:
            return -(-numbers // size)

        parameters = self.parameters - self.shared_parameters + share(self.shared_parameters)
        return replace(
            self,
            parameters=parameters,
            read_parameters=parameters - share(self.parameters - self.read_parameters),
            lm_head_parameters=share(self.lm_head_parameters),
            kv_heads=share(self.kv_heads),
            windows=tuple(window._replace(kv_heads=share(window.kv_heads)) for window in self.windows),
            shared_parameters=share(self.shared_parameters),
        )

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.value_bytes

    @property
    def pass_bytes(self) -> int:
        """Weights that one pass reads."""
        return self.read_parameters * self.value_bytes

    def cache_bytes(self, tokens: int) -> int:
        """Keys and values of ``tokens`` positions, e.g. 2 x 32 layers x 102,400 x 8 x 128 x 2 bytes = 13.4 GB."""
        return self._bytes(tokens, lambda size: size * self.value_bytes)

    def _bytes(self, tokens: int, vector: Callable[[int], int]) -> int:
        """What all layers keep of so many positions, where a key or value of a head takes so many bytes by its size."""
        whole = (self.layers - len(self.windows)) * tokens * self.kv_heads * vector(self.head_dim)
        return 2 * (whole + sum(min(tokens, one.slots) * one.kv_heads * vector(one.head_dim) for one in self.windows))

    def full_cache(self, tokens: int, form: CacheForm, device: torch.device = CUDA) -> tuple[int, int]:
        """Bytes of a full cache of that form, on the device and in host memory."""
        kept, layers = self.kept_bytes(tokens, form), form.working_layers(device)
        working = self.cache_bytes(tokens) * layers // self.layers
        if not form.offload:
            return kept + working, 0
        # Codes arrive on the device before they are restored there.
        arriving = kept * layers // self.layers if form.kv_dtype and device.type != "cpu" else 0
        return working + arriving, kept

    def kept_bytes(self, tokens: int, form: CacheForm) -> int:
        """Keys and values of ``tokens`` positions as a cache of that form keeps them."""
        return self._bytes(tokens, lambda size: form.vector_bytes(size, self.value_bytes))

    def heads_bytes(self, heads: int) -> int:
        """That many chained draft heads: one square matrix and two norms each."""
        return heads * (self.hidden_size**2 + 2 * self.hidden_size) * self.value_bytes


def _kept_heads(layer: PreTrainedConfig) -> tuple[int, int]:
    """The KV heads of a layer, and their size."""
    # Of compressed keys and values: as a key and a value of half their size each.
    if getattr(layer, "kv_lora_rank", None):
        return 1, (layer.kv_lora_rank + layer.qk_rope_head_dim) // 2
    heads, size = layer.num_attention_heads, getattr(layer, "head_dim", None)
    return getattr(layer, "num_key_value_heads", None) or heads, size or layer.hidden_size // heads


def read_shape(model: str, dtype: str = "auto", processes: int = 1) -> ModelShape:
    """The shape of what `read_config` takes, without its weights, or the share of one of several processes.

    Args:
        dtype: "auto" is the configuration's, bfloat16 when it names none.

    Raises:
        OSError: there is no such configuration.
        ValueError: the configuration cannot be read or is of no causal language model, so many processes cannot share
            the model, or four bits cannot hold it.
    """
    config = read_config(model)
    if processes > 1:
        refuse_unshareable(config, processes)
    empty = empty_model(config, model)
    return ModelShape.of(empty, held_dtype(config, dtype), dtype if dtype in QUANTISED_DTYPES else None).shared(
        processes
    )


def held_dtype(config: PreTrainedConfig, dtype: str) -> torch.dtype:
    """The dtype of caches and embeddings under ``dtype``; "auto" is the configuration's, bfloat16 when it names none.

    Raises ValueError.
    """
    if dtype == "auto":
        return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}{meant(dtype, DTYPES)}: use one of {', '.join(DTYPES)}")
    return getattr(torch, dtype_around() if dtype in QUANTISED_DTYPES else dtype)


def read_config(model: str) -> PreTrainedConfig:
    """The configuration of a model folder, GGUF file or hub id, in a file, or of one of `CONFIGS`.

    Raises:
        OSError: there is no such configuration.
        ValueError: it cannot be read.
    """
    shipped = CONFIGS / f"{model}.json"
    if not Path(model).exists() and shipped.parent == CONFIGS and shipped.is_file():
        model = str(shipped)
    if is_gguf(model):
        return loading.read_config(model)
    if not Path(model).is_file():
        try:
            refuse_missing("model", model)
        except FileNotFoundError as error:
            names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
            raise FileNotFoundError(f"{error}; configurations known by name are {names}") from error
        with named(model):
            return AutoConfig.from_pretrained(model)
    content = parse_json(Path(model).read_bytes(), model)
    try:
        return AutoConfig.for_model(**content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{model} is no model configuration (a JSON object with a model_type)") from error
