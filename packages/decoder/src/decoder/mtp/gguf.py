"""Built-in multi-token-prediction modules in GGUF files: the layer behind the last one, with llama.cpp's names."""

import logging
from pathlib import Path

import torch

from decoder.heads_files import refuse_misfits
from decoder.model.gguf import GgufFile, open_checked
from decoder.model.gguf.architectures import architecture_of
from decoder.model.gguf.config import read_config
from decoder.model.gguf.sources import LAYER, Source
from decoder.model.gguf.weights import join_sources, parameter
from decoder.mtp.checkpoint import FAMILIES, module_config
from decoder.mtp.module import MtpModule

logger = logging.getLogger(__name__)

_PREDICTS = "nextn."
_PARTS = {
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
}
_SHARED = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # copies of the model's

_told: set[str] = set()


def file_holds_mtp(file: GgufFile) -> bool:
    """Whether a file has a module that could be read, as the names of its tensors tell."""
    predicts = any(layer and layer[2].startswith(_PREDICTS) for layer in map(LAYER.fullmatch, file.tensors))
    return predicts and architecture_of(file).model_type in FAMILIES


def usable_in_file(path: Path) -> bool:
    """Whether the module in a model's file can be read, as names and shapes tell; a fault is told once."""
    try:
        file = open_checked(path)
        if not file_holds_mtp(file):
            return False
        _checked(file)
    except (OSError, ValueError) as error:
        if str(path) not in _told:
            _told.add(str(path))
            logger.warning("decoding goes on without built-in heads: %s", error)
        return False
    return True


def read_mtp_of_file(path: Path) -> MtpModule:
    """The module in a model's file, its weights unpacked to bfloat16, or to float32 if they are so there.

    Raises:
        OSError: the file is missing.
        ValueError: it has none, or tensors are missing, of other shapes, or no finite numbers.
    """
    file = open_checked(path)
    if not file_holds_mtp(file):
        raise ValueError(f"{path} has no multi-token-prediction module that can be read: leave out heads mtp")
    module, made = _checked(file)
    [joins] = made["fc.weight"].tensors
    dtype = torch.float32 if file.tensors[joins].format.name == "F32" else torch.bfloat16
    tensors = {name: parameter(file, source, dtype) for name, source in made.items()}
    module.load_state_dict(tensors, assign=True)
    module.source = str(path)
    return module.requires_grad_(False)


def _checked(file: GgufFile) -> tuple[MtpModule, dict[str, Source]]:
    """The module on the meta device, and what its tensors are made of, whose names and shapes are right."""
    config, architecture = read_config(file), architecture_of(file)
    made: dict[str, Source] = {}
    for name in file.tensors:
        layer = LAYER.fullmatch(name)
        # One module serves all levels: those for tokens further ahead are left.
        if layer is None or int(layer[1]) != config.num_hidden_layers or layer[2] in _SHARED:
            continue
        own = layer[2]
        ours = _PARTS.get(own) or architecture.parameter("0", own)
        if ours is None:
            raise ValueError(f"the built-in heads in {file.path} have extra tensors: {name}")
        ours = ours.removeprefix("model.")
        made[ours] = join_sources(made.get(ours), name, architecture.change(config, own))
    experts = any(".mlp.experts." in name for name in made)
    with torch.device("meta"):
        module = MtpModule(module_config(config, experts))
        found = {
            name: torch.empty(source.shape([file.tensors[each].shape for each in source.tensors]))
            for name, source in made.items()
        }
    refuse_misfits(found, module.state_dict(), f"the built-in heads in {file.path}")
    return module, made
