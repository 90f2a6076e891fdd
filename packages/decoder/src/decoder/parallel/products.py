"""The shared layers of a model as plain products of this process's part, and one call to the other processes.

transformers wraps each layer that processes share, which takes longer than a small product. While a pass runs, these
forwards stand in its place. They multiply with a plain layer that views this process's part of the weights, so that a
product with packed weights can replace that.
"""

import re
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from decoder.parallel.ranks import Ranks
from decoder.parallel.sharding import own_part

Forward = Callable[[torch.Tensor], torch.Tensor]

_WRAPPED_BY = "transformers.distributed.tensor_parallel"
_TOLERANCE = 1e-2  # a relative error above that of half precision


class SharedLayers:
    """The layers of a model that processes share, by the style in which transformers' plan shares them.

    Args:
        model: the model.
        ranks: the processes; all of them make this at the same time, since layers are tried.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks):
        self._ranks = ranks
        self._styles: dict[nn.Module, str] = {}
        self._parts: dict[nn.Module, nn.Module] = {}
        self._holders: list[nn.Module] = []
        self._weights: dict[nn.Module, torch.Tensor] = {}
        # Within inference mode no view of a parameter can become one.
        with torch.inference_mode(False), torch.no_grad():
            self._find(model)
        self._refuse_unlike()

    def _find(self, model: PreTrainedModel) -> None:
        plan = model.tp_plan or {}
        for name, parent in model.named_modules() if self._ranks.size > 1 else ():
            children = {}
            for child_name, child in parent.named_children():
                generic = re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{child_name}".lstrip("."))
                style = plan.get(generic, "")
                if style in _STYLES and _is_wrapped(child):
                    self._styles[child], self._weights[child] = style, child.weight
                    children[child_name] = self._parts[child] = _part_of(child)
            if children:
                # Under its own names, by which layers with the same input are found.
                self._holders.append(nn.ModuleDict(children))

    @property
    def current(self) -> bool:
        """Whether no parameter has been replaced by another one since; changes in place are seen in the parts."""
        return all(layer.weight is weight for layer, weight in self._weights.items())

    @property
    def modules(self) -> list[nn.Module]:
        """Layers with this process's part of the weights, below modules that hold them by their names in the model."""
        return [module for holder in self._holders for module in holder.modules()]

    def forwards(self, faster: Mapping[nn.Module, Forward]) -> dict[nn.Module, Forward]:
        """By layer of the model, its other forward; ``faster`` are other forwards of `modules`."""
        return {
            layer: self._forward(layer, faster.get(part, part.forward))
            for layer, part in self._parts.items()
            if layer in self._styles and _is_wrapped(layer)
        }

    def _forward(self, layer: nn.Module, product: Forward) -> Forward:
        group = layer.weight.device_mesh.get_group()  # type: ignore[union-attr,operator]
        forward = _STYLES[self._styles[layer]](layer, product, group, self._ranks)
        forward.over = layer.__dict__["forward"]  # type: ignore[attr-defined]  # what it stands in the place of
        return forward

    @torch.inference_mode()
    def _refuse_unlike(self) -> None:
        """Leave the layers of a style to transformers if a trial of one of them gives something else."""
        tried: dict[str, bool] = {}
        for layer, style in list(self._styles.items()):
            if style not in tried:
                trial, own = _trial(layer), self._forward(layer, self._parts[layer].forward)
                expected = layer(trial)
                same = (own(trial) - expected).norm() <= _TOLERANCE * expected.norm()
                tried[style] = self._ranks.all(bool(same))
            if not tried[style]:
                del self._styles[layer]


def _is_wrapped(layer: nn.Module) -> bool:
    """Whether a layer has the forward that transformers gave it, and none of the user's."""
    return getattr(layer.__dict__.get("forward"), "__module__", None) == _WRAPPED_BY


def _part_of(layer: nn.Module) -> nn.Module:
    """A plain layer that views this process's part of the weights."""
    part: nn.Module
    if isinstance(layer, nn.Embedding):
        part = nn.Embedding(1, 1, device="meta")
    else:
        # A row-wise product is summed over the processes before its bias is added.
        part = nn.Linear(1, 1, bias=False, device="meta")
    weight = own_part(layer.weight)  # type: ignore[arg-type]
    part.weight = nn.Parameter(weight, requires_grad=False)
    if isinstance(part, nn.Linear):
        part.out_features, part.in_features = weight.shape
    return part


def _trial(layer: nn.Module) -> torch.Tensor:
    """An input for a layer, the same in each process: two tokens."""
    if isinstance(layer, nn.Embedding):
        return torch.tensor([[0, layer.num_embeddings - 1]], device=layer.weight.device)
    generator = torch.Generator().manual_seed(0)
    inputs = own_part(layer.weight).shape[1]  # type: ignore[arg-type]
    return torch.randn(1, 2, inputs, generator=generator).to(layer.weight)  # type: ignore[arg-type]


def _colwise(layer: nn.Linear, product: Forward, group: object, ranks: Ranks) -> Forward:
    bias = None if layer.bias is None else own_part(layer.bias)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return product(x) if bias is None else product(x) + bias

    return forward


def _rowwise(layer: nn.Linear, product: Forward, group: object, ranks: Ranks) -> Forward:
    bias = None if layer.bias is None else own_part(layer.bias)

    def forward(x: torch.Tensor) -> torch.Tensor:
        output = product(x)
        dist.all_reduce(output, group=group)
        return output if bias is None else output + bias

    return forward


def _gathered(layer: nn.Linear, product: Forward, group: object, ranks: Ranks) -> Forward:
    own, outputs = _colwise(layer, product, group, ranks), layer.out_features
    most = -(-outputs // ranks.size)  # of a process; the last ones have fewer

    def forward(x: torch.Tensor) -> torch.Tensor:
        part = own(x)
        part = functional.pad(part, (0, most - part.shape[-1])) if part.shape[-1] < most else part.contiguous()
        everyone = part.new_empty(ranks.size * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(everyone, part, group=group)
        return everyone.view(ranks.size, *part.shape).movedim(0, -2).flatten(-2)[..., :outputs]

    return forward


def _embedding(layer: nn.Embedding, product: Forward, group: object, ranks: Ranks) -> Forward:
    own = own_part(layer.weight)
    first = ranks.rank * -(-layer.num_embeddings // ranks.size)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        rows = ids - first
        here = (rows >= 0) & (rows < len(own))
        found = functional.embedding(rows.where(here, 0), own) if len(own) else own.new_zeros(*ids.shape, own.shape[1])
        found = found.masked_fill(~here[..., None], 0)
        dist.all_reduce(found, group=group)
        return found

    return forward


_STYLES: dict[str, Callable[..., Forward]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "colwise_gather_output": _gathered,
    "embedding_rowwise": _embedding,
}
