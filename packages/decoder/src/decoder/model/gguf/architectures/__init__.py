"""The architectures that are read, by their kind of layers."""

from decoder.model.gguf.architectures.base import Architecture
from decoder.model.gguf.architectures.dense import DENSE
from decoder.model.gguf.architectures.experts import OF_EXPERTS
from decoder.model.gguf.architectures.gemma import GEMMA
from decoder.model.gguf.architectures.recurrent import RECURRENT
from decoder.model.gguf.file import ELSE, GgufFile

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of"]

ARCHITECTURES = DENSE | GEMMA | OF_EXPERTS | RECURRENT

# Architectures of llama.cpp that are two here: the key, or the end of a tensor's name, that the other one has.
_OTHERS = {
    "llama": ("expert_count", "mixtral"),
    "olmo2": ("attention.sliding_window", "olmo3"),
    "mistral3": ("attention.temperature_scale", "ministral3"),
    "deepseek2": (".exp_probs_b.bias", "deepseek3"),
}


def architecture_of(file: GgufFile) -> Architecture:
    """How the model of a file is read. Raises ValueError for an architecture that is not."""
    name = file.architecture
    key, other = _OTHERS.get(name, ("", name))
    if key and (file.metadata.get(f"{name}.{key}") or any(tensor.endswith(key) for tensor in file.tensors)):
        name = other
    elif name in (other for _, other in _OTHERS.values()):
        name = ""
    if name not in ARCHITECTURES:
        raise ValueError(
            f"models of the architecture {file.architecture} cannot be read from the GGUF file {file.path}: {ELSE}"
        )
    return ARCHITECTURES[name]
