"""The frozen model under the heads: its configuration, its tokenizer, its last hidden state."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PretrainedConfig, PreTrainedModel

from decoder import DraftHeads
from decoder.parts import check_source, is_gguf, meant_beside, read_config, read_model, read_tokenizer
from heads_train.states import StateCache

_EPSILONS = ("rms_norm_eps", "norm_eps")
_EPSILON_OF_TYPE = {"nemotron_h": "layer_norm_epsilon"}  # elsewhere the name of an epsilon of other norms


def _check_local(name: str) -> None:
    """Refuse a folder or GGUF file that is not there before `decoder` would look for it on the hub."""
    # data/ and runs/ are this repository's own folders and no owners on the hub.
    looks_local = name.startswith(("/", ".", "~", "data/", "runs/")) or name.count("/") != 1
    if is_gguf(name):
        check_source("model", name)
    elif looks_local and not Path(name).is_dir():
        where = "" if Path(name).is_absolute() else " (looked for below the current folder)"
        near = meant_beside(name)
        raise FileNotFoundError(f"there is no model folder at {name}{near}{where}: give one that is there, or a hub id")


def load_config(name: str) -> PretrainedConfig:
    """The configuration of a model folder, GGUF file or hub id.

    Raises OSError when it cannot be loaded, ValueError for a model that `decoder` could not decode.
    """
    _check_local(name)
    return read_config(name)


def load_tokenizer(name: str):
    """The tokenizer of a model folder, GGUF file or hub id. Raises OSError when it cannot be loaded."""
    _check_local(name)
    return read_tokenizer(name)


def load_backbone(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder, GGUF file or hub id in ``dtype``, frozen, in eval mode.

    Raises OSError when it cannot be loaded, ValueError when it lacks tensors that its configuration asks for.
    """
    _check_local(name)
    # Lightning makes the training device the default one while a model is configured.
    return read_model(name, torch.get_default_device(), dtype=dtype).requires_grad_(False)


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard the weights of the layers, which are all but the whole model, over ``mesh`` (FSDP2).

    The embeddings, the final norm and the language-model head stay whole on every device: the loss reads them outside
    of the model's own forward.
    """
    decoder = model.get_decoder()
    outside = set(decoder.parameters()) - set(decoder.layers.parameters())
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(decoder, mesh=mesh, ignored_params=outside)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the language-model head.

    Raises ValueError for a model that has none, or one whose norm is no RMSNorm: the heads' output norms could not
    start as its copy.
    """
    decoder = model.get_decoder()
    hidden_size = model.config.get_text_config().hidden_size
    norms = [
        child
        for child in decoder.children()
        if isinstance(weight := getattr(child, "weight", None), Tensor) and weight.shape == (hidden_size,)
    ]
    eps = norm_eps(model.config.get_text_config())
    if norms:
        weight = norm_weight(norms[-1])
        copy = DraftHeads(hidden_size, 1, eps).to(weight)
        copy.init_from_norm(weight)
        probe = torch.linspace(-3, 3, hidden_size).to(weight)
        if torch.allclose(norms[-1](probe), copy(probe)[0], rtol=1e-2, atol=1e-2):
            return norms[-1]
    raise ValueError(f"{type(model).__name__} is not supported: it has no RMSNorm after its layers")


@torch.no_grad()
def norm_weight(norm: nn.Module) -> Tensor:
    """What an RMSNorm multiplies by [d]; Gemma's and Qwen3-Next's keep how far that is from one."""
    weight = norm.get_parameter("weight")
    seen = norm(torch.ones_like(weight))
    return min((weight, 1 + weight), key=lambda one: float((one - seen).abs().max()))


def norm_eps(config: PretrainedConfig) -> float:
    """The epsilon of the model's norms. Raises ValueError when the configuration has none."""
    names = (*_EPSILONS, _EPSILON_OF_TYPE.get(config.model_type, ""))
    found = [eps for name in names if (eps := getattr(config, name, None)) is not None]
    if not found:
        raise ValueError(f"models of type {config.model_type} are not supported: they have no rms_norm_eps")
    return found[0]


class FrozenStates:
    """Runs a model's layers and returns its states: h_0, the input of its final norm, and before it those of layers.

    Args:
        layers: the layers whose inputs a drafter reads (`Eagle3Config.target_layers`).
        kept: where the states of chunks seen before are kept; None keeps none.

    Raises:
        ValueError: the model's logits are not what its language-model head makes of the normed h_0, so that the loss
            would be that of another model.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = (), kept: StateCache | None = None):
        self.decoder, self.kept = model.get_decoder(), kept
        self._seen: list[Tensor] | None = None  # a list while the model runs; the loss calls the norm, too
        self.norm = final_norm(model)
        for module in (*((*self.decoder.layers, self.norm)[layer] for layer in layers), self.norm):
            module.register_forward_pre_hook(self._keep, with_kwargs=True)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self.dtype = model.dtype
        self._check_logits(model)

    @property
    def device(self) -> torch.device:
        """Where the model is by now."""
        return self.norm.get_parameter("weight").device

    @torch.no_grad()
    def _check_logits(self, model: PreTrainedModel) -> None:
        self._seen = []
        logits = model(input_ids=torch.arange(4, device=model.device)[None] % self.vocabulary, use_cache=False).logits
        hidden, self._seen = self._seen[-1], None
        expected = model.get_output_embeddings()(self.norm(hidden))
        if not torch.allclose(logits, expected.to(logits), rtol=1e-2, atol=1e-2 * expected.abs().max().item()):
            raise ValueError(
                f"{type(model).__name__} is not supported: it changes its logits behind the language-model head"
            )

    def _keep(self, _, inputs: tuple, named: dict) -> None:
        if self._seen is not None:
            self._seen.append(inputs[0] if inputs else named["hidden_states"])

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> Tensor:
        """``input_ids`` [batch, length] -> states [batch, length, (layers + 1) d], without gradients; h_0 comes last.

        Raises ValueError for ids that the model has no embedding of.
        """
        if self.kept is None:
            return self._run(input_ids)
        found = [self.kept.get(ids) for ids in input_ids]
        if missing := [row for row, states in enumerate(found) if states is None]:
            for row, states in zip(missing, self._run(input_ids[missing]), strict=True):
                self.kept.put(input_ids[row], states)
                found[row] = states.cpu()
        return torch.stack(found).to(input_ids.device, self.dtype)

    def _run(self, input_ids: Tensor) -> Tensor:
        if (largest := input_ids.max().item()) >= self.vocabulary:
            raise ValueError(
                f"the tokenizer gives token {largest}, and the model has {self.vocabulary} tokens only: give the model "
                "its own tokenizer"
            )
        self._seen = []
        self.decoder(input_ids=input_ids, use_cache=False)
        states, self._seen = torch.cat(self._seen, dim=-1), None
        return states
