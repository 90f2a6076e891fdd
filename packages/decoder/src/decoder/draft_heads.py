"""The draft heads: gamma small residual layers on a frozen model's last hidden state, and their checkpoints."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from decoder.checks import meant
from decoder.heads_files import (
    CONFIG,
    PUBLISHED_NAME,
    WEIGHTS,
    local_folder,
    published_files,
    read_json,
    read_tensors,
    refuse_misfits,
    write_checkpoint,
)
from decoder.timings import stage

KINDS = ("gated", "conditioned", "chained", "independent", "medusa")
"""Those first whose drafts are accepted most often."""
ARCHITECTURE = "tokenswift-heads"
FORMAT_VERSION = 1
DRAFT_TO_TARGET = "draft_to_target"

PUBLISHED_PARTS = {
    "linear.weight": "linear.weight",
    "input_layernorm.weight": "input_norm.weight",
    "post_layernorm.weight": "output_norm.weight",
}


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, as Llama computes it: statistics in float32 or wider."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class DraftHead(nn.Module):
    """One head: a linear layer without bias between two norms, with a residual around the first two.

    The layer is [d, d]. In a ``conditioned`` head it is [d, 2d] and also reads the embedding of the token before. A
    ``gated`` head has a gated unit (SwiGLU, ``gate_width`` wide) in parallel to the linear layer.
    """

    def __init__(self, hidden_size: int, norm_eps: float, conditioned: bool, gate_width: int | None):
        super().__init__()
        self.input_norm = RMSNorm(hidden_size, norm_eps)
        self.linear = nn.Linear(hidden_size * (2 if conditioned else 1), hidden_size, bias=False)
        self.output_norm = RMSNorm(hidden_size, norm_eps)
        nn.init.zeros_(self.linear.weight)
        self.gated = gate_width is not None
        if gate_width is not None:
            self.gate = nn.Linear(2 * hidden_size, gate_width, bias=False)
            self.up = nn.Linear(2 * hidden_size, gate_width, bias=False)
            self.down = nn.Linear(gate_width, hidden_size, bias=False)
            nn.init.zeros_(self.down.weight)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        features = self.features(hidden, embedding)
        change = self.linear(features)
        if self.gated:
            change = change + self.down(self.gated_features(features))
        return change + hidden

    def features(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        """What the linear layer reads [..., d or 2d]."""
        features = self.input_norm(hidden)
        if embedding is not None:
            # Embeddings have any scale; they are normalised like the state that they are concatenated with.
            unit = functional.rms_norm(embedding, embedding.shape[-1:])
            features = torch.cat((features, unit.to(features.dtype)), dim=-1)
        # The weights may have a narrower dtype than the states, so that fewer bytes are read.
        return features.to(self.linear.weight.dtype)

    def gated_features(self, features: torch.Tensor) -> torch.Tensor:
        """What the last layer of the gated unit reads [..., gate_width]."""
        return functional.silu(self.gate(features)) * self.up(features)


class MedusaHead(nn.Module):
    """A head of Medusa's own form (arXiv 2401.10774), which other engines run: a linear layer with SiLU and residual.

    It reads the state behind the model's final norm, whose weight is here as a buffer, since it is not learned.
    """

    def __init__(self, hidden_size: int, norm_eps: float):
        super().__init__()
        self.input_norm = RMSNorm(hidden_size, norm_eps)
        del self.input_norm.weight
        self.input_norm.register_buffer("weight", torch.ones(hidden_size))
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)
        self.output_norm = nn.Identity()
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: torch.Tensor, embedding: None) -> torch.Tensor:
        features = self.input_norm(hidden)
        return features + functional.silu(self.linear(features.to(self.linear.weight.dtype)))


class Drafting(nn.Module):
    """What draft heads of all kinds are.

    Attributes:
        source: where they were read from, which errors name.
        draft_to_target: ids of the tokens drafted, int64 [v]; None drafts all.
    """

    source: str | None = None
    draft_to_target: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(DRAFT_TO_TARGET, None)

    @property
    def draft_vocab_size(self) -> int | None:
        """How many of the model's tokens they draft; None means all."""
        return None if self.draft_to_target is None else len(self.draft_to_target)

    @property
    def _where(self) -> str:
        """The words that name the checkpoint in an error; none if they were not read from one."""
        return "" if self.source is None else f" in {self.source}"

    def check_finite(self) -> None:
        """Raise ValueError if a parameter is not finite, for instance because it is too large for the dtype."""
        for name, tensor in self.named_parameters():
            if tensor.dtype != torch.uint8:  # matrices of a file's formats, which were looked at when they were read
                refuse_not_finite(name, tensor, self._where)


class DraftHeads(Drafting):
    """gamma = ``num_heads`` heads that share the model's language-model head (paper, multi-token self-drafting).

    There are five kinds. ``chained`` heads read each other, ``h_i = linear_i(input_norm_i(h_{i-1})) + h_{i-1}``.
    ``independent`` heads (Medusa*) all read ``h_0``, and so do ``medusa`` ones, see `MedusaHead`. ``conditioned`` heads
    are chained and also read the embedding of the token drafted before,
    ``h_i = linear_i([input_norm_i(h_{i-1}); e(x_i)]) + h_{i-1}`` with e scaled to a root mean square of one (compare
    Hydra, arXiv 2402.05109). ``gated`` heads are conditioned and have a gated unit each, which is 5 d ``gate_width``
    more parameters; 2 d is the usual width, and what None stands for. New heads are the identity: what they add to the
    state is zero, and their norms are one.

    ``shared`` heads are all the same one, which goes on from its own state as often as there are heads: it takes the
    place of num_heads, and learns from as many tokens again. Only conditioned and gated heads can be.

    With a draft vocabulary they draft only some of the model's tokens, so that a level reads only their rows of the
    language-model head: ``draft_to_target`` [v] are the ids of these tokens, int64, ascending. None drafts all tokens.

    Raises ValueError for an unknown kind, fewer than one head, a hidden size or gate width below one, a gate width or
    sharing that the kind does not have, or a wrong ``draft_to_target``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 3,
        norm_eps: float = 1e-6,
        kind: str = "chained",
        draft_to_target: torch.Tensor | None = None,
        gate_width: int | None = None,
        shared: bool = False,
    ):
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"unknown kind of heads {kind!r}{meant(kind, KINDS)}; known kinds are {', '.join(KINDS)}")
        for name, value in (("hidden_size", hidden_size), ("num_heads", num_heads), ("gate_width", gate_width)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if gate_width is not None and kind != "gated":
            raise ValueError(f"gate_width is for gated heads, and these are {kind}: leave it out")
        self.hidden_size, self.num_heads, self.norm_eps, self.kind = hidden_size, num_heads, norm_eps, kind
        if shared and not self.conditioned:
            raise ValueError(f"shared is for conditioned and gated heads, and these are {kind}: leave it out")
        self.gate_width, self.shared = (gate_width or 2 * hidden_size) if kind == "gated" else None, shared
        made = [
            MedusaHead(hidden_size, norm_eps)
            if kind == "medusa"
            else DraftHead(hidden_size, norm_eps, self.conditioned, self.gate_width)
            for _ in range(1 if shared else num_heads)
        ]
        self.heads = nn.ModuleList(made * num_heads if shared else made)
        if draft_to_target is not None:
            self.set_draft_vocabulary(draft_to_target)

    def set_draft_vocabulary(self, draft_to_target: torch.Tensor | None) -> None:
        """Draft only the tokens ``draft_to_target`` [v], or all (None). Raises ValueError unless they ascend."""
        if draft_to_target is not None:
            _refuse_no_map(draft_to_target, self._where and f" of the heads{self._where}")
            draft_to_target = draft_to_target.to(next(self.parameters()).device)
        self.draft_to_target = draft_to_target

    @property
    def conditioned(self) -> bool:
        """Whether each head needs the embedding of the token drafted before it."""
        return self.kind in ("conditioned", "gated")

    @property
    def chained(self) -> bool:
        """Whether each head reads what the one before it has made."""
        return self.kind not in ("independent", "medusa")

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, num_heads={self.num_heads}, hidden_size={self.hidden_size}"

    @stage("draft")
    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor | None = None, count: int | None = None
    ) -> list[torch.Tensor]:
        """Run all heads, or the first ``count``: ``output_norm_i(h_i)`` of each, ready for the language-model head.

        ``hidden`` [..., d] is ``h_0``: the output of the model's last layer *before* the model's final norm.
        ``tokens`` [..., num_heads, d] are the input embeddings of the tokens 1 .. num_heads positions ahead; only
        conditioned heads read them.
        Returns ``num_heads`` (or ``count``) tensors [..., d]; the i-th (from 1) is for the token i + 1 positions ahead.
        Raises ValueError if conditioned heads get no tokens.
        """
        if self.conditioned and tokens is None:
            raise ValueError("conditioned heads need the embeddings of the tokens before each head")
        outputs, state = [], hidden
        for i in range(self.num_heads if count is None else count):
            before = state if self.chained else hidden
            state, output = self.advance(i, before, tokens[..., i, :] if self.conditioned else None)
            outputs.append(output)
        return outputs

    @stage("draft")
    def advance(
        self, index: int, state: torch.Tensor, embedding: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run head ``index`` (from 0) alone on the ``state`` [..., d] before it; returns h and output_norm(h) [..., d].

        ``embedding`` [..., d], of the token drafted before this one, is for conditioned heads.
        """
        head = self._head(index)
        state = head(state, embedding)
        return state, head.output_norm(state)

    def _head(self, index: int) -> DraftHead:
        return cast(DraftHead, self.heads[index])

    @torch.no_grad()
    def init_from_norm(self, weight: torch.Tensor) -> None:
        """Copy the model's final norm, ``weight`` [d], to the output norms; in ``medusa`` heads to the input norms.

        Untrained heads then predict exactly what the model's own last hidden state predicts.
        Raises ValueError if the size differs.
        """
        self.check_fits(weight.shape[-1])
        for index in range(len(self.heads)):
            head = self._head(index)
            (head.input_norm if self.kind == "medusa" else head.output_norm).weight.copy_(weight)

    def check_fits(self, hidden_size: int, vocab_size: int | None = None) -> None:
        """Raise ValueError unless the heads are for a model of ``hidden_size``, with ``vocab_size`` tokens if given."""
        which = f"the heads{self._where}"
        if hidden_size != self.hidden_size:
            sizes = f"hidden size {self.hidden_size}, the model has {hidden_size}"
            raise ValueError(f"{which} are for {sizes}: give heads of this model")
        if vocab_size is not None and self.draft_to_target is not None:
            largest = self.draft_to_target[-1].item()
            if largest >= vocab_size:
                raise ValueError(
                    f"{which} draft token {largest}, and the model has {vocab_size} tokens: they are another model's"
                )

    def save_pretrained(
        self, directory: str | os.PathLike, *, base_model: str | None = None, training: Mapping | None = None
    ) -> None:
        """Write ``heads.safetensors`` and ``config.json`` into ``directory``; each file appears whole or not at all.

        Parameters are saved in their dtype. ``base_model`` names the model that the heads are for, and ``training``
        says how they were trained (anything JSON can hold). Raises OSError if the folder cannot be written.
        """
        config = {
            "architecture": ARCHITECTURE,
            "format_version": FORMAT_VERSION,
            "num_heads": self.num_heads,
            "hidden_size": self.hidden_size,
            "norm_eps": self.norm_eps,
            "kind": self.kind,
            "base_model": base_model,
            "training": dict(training) if training is not None else None,
        }
        if self.draft_vocab_size is not None:
            config["draft_vocab_size"] = self.draft_vocab_size
        # Named only where they are not the usual, so that heads of earlier versions have the same files.
        if self.gate_width not in (None, 2 * self.hidden_size):
            config["gate_width"] = self.gate_width
        if self.shared:
            config["shared"] = True
        write_checkpoint(directory, WEIGHTS, self._stored(), config)

    def _stored(self) -> dict[str, torch.Tensor]:
        """What a file holds: of shared heads the first."""
        first = "heads.0."
        return {
            name: tensor
            for name, tensor in self.state_dict().items()
            if not self.shared or name.startswith(first) or not name.startswith("heads.")
        }

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike,
        *,
        cache_dir: str | os.PathLike | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> "DraftHeads":
        """Load heads from a folder or a Hugging Face hub id, in the dtype they were saved in.

        Reads checkpoints of ``save_pretrained`` and the published TokenSwift ones, whose head tensors lie inside a
        whole model's safetensors (one file or several). Raises OSError when there is no such folder, file or
        reachable hub repository, ValueError when the contents are not heads of a known format.

        Args:
            source: the folder or hub id.
            cache_dir: the folder for files of the hub, instead of its usual cache.
            token: an access token for the hub; True takes the stored one.
            local_files_only: use only what is in the cache, and do not ask the hub.
        """
        directory = local_folder(str(source), cache_dir=cache_dir, token=token, local_files_only=local_files_only)
        return cls.read(directory, read_json(directory / CONFIG), str(source))

    @classmethod
    def read(cls, directory: Path, config: dict, source: str) -> "DraftHeads":
        """The heads in a folder whose ``config.json`` holds ``config``; ``source`` is what errors call them."""
        if any(name in str(config.get("architectures")).lower() for name in ("eagle3", "dflash")):
            raise ValueError(f"{directory} is a draft model of EAGLE-3 or DFlash: read it with decoder.load_heads")
        own = config.get("architecture") == ARCHITECTURE
        heads = cls._from_own(directory, config) if own else cls._from_published(directory, config)
        heads.source = source
        return heads

    @classmethod
    def _from_own(cls, directory: Path, config: dict) -> "DraftHeads":
        version = config.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"{directory} has heads of format version {version}, this program reads {FORMAT_VERSION}")
        path = directory / WEIGHTS
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no {WEIGHTS}")
        fields = {name: config.get(name) for name in ("hidden_size", "num_heads", "norm_eps", "kind")}
        fields |= {name: config[name] for name in ("gate_width", "shared") if name in config}
        heads = cls._build(directory, fields, read_tensors(path))
        if (told := config.get("draft_vocab_size")) != heads.draft_vocab_size:
            raise ValueError(
                f"{directory / CONFIG} says draft_vocab_size {told}, and {WEIGHTS} has {heads.draft_vocab_size}: copy "
                "both files anew"
            )
        return heads

    @classmethod
    def _from_published(cls, directory: Path, config: dict) -> "DraftHeads":
        tensors = {}
        for name in published_files(directory):
            path = directory / name
            if not path.is_file():
                raise FileNotFoundError(f"{directory} has no {name}, which its index names")
            for found, tensor in read_tensors(path, PUBLISHED_NAME).items():
                number, _, part = PUBLISHED_NAME.fullmatch(found)[1].partition(".")
                tensors[f"heads.{number}.{PUBLISHED_PARTS[part]}" if part in PUBLISHED_PARTS else found] = tensor
        if not tensors:
            pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
            hint = "give what heads-train has written"
            if pickled:
                hint = "of pickle files those of EAGLE-3 alone are read, and config.json names another architecture"
            fault = "is not a heads checkpoint: it has no tensors of a known heads format"
            raise ValueError(f"{directory} {fault}; {hint}")
        fields = {
            "hidden_size": config.get("hidden_size"),
            "num_heads": len({name.split(".")[1] for name in tensors if name.startswith("heads.")}),
            "norm_eps": config.get("rms_norm_eps"),
            "kind": "chained",
        }
        return cls._build(directory, fields, tensors)

    @classmethod
    def _build(cls, directory: Path, fields: dict, tensors: dict[str, torch.Tensor]) -> "DraftHeads":
        for name, kind in (
            ("hidden_size", int),
            ("num_heads", int),
            ("norm_eps", float),
            ("kind", str),
            ("gate_width", int),
            ("shared", bool),
        ):
            if name in fields and not isinstance(fields[name], kind):
                raise ValueError(f"{directory / CONFIG} gives no usable {name}: {fields[name]!r}")
        try:
            with torch.device("meta"):
                heads = cls(**fields)
        except ValueError as error:
            raise ValueError(f"{directory / CONFIG}: {error}") from error
        if (draft_to_target := tensors.pop(DRAFT_TO_TARGET, None)) is not None:
            _refuse_no_map(draft_to_target, f" of the heads in {directory}")
        refuse_misfits(tensors, heads._stored(), f"the heads in {directory}")
        for name, tensor in tensors.items():
            refuse_not_finite(name, tensor, f" in {directory}")
        if heads.shared:
            parts = {name.removeprefix("heads.0."): tensor for name, tensor in tensors.items()}
            tensors = {f"heads.{i}.{name}": tensor for i in range(heads.num_heads) for name, tensor in parts.items()}
        heads.load_state_dict(tensors, assign=True)
        heads.set_draft_vocabulary(draft_to_target)
        return heads.requires_grad_(True)


def refuse_not_finite(name: str, tensor: torch.Tensor, where: str) -> None:
    if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
        raise ValueError(f"tensor {name} of the heads{where} holds values that are no finite numbers")


def _refuse_no_map(draft_to_target: torch.Tensor, where: str) -> None:
    """Raise ValueError unless ``draft_to_target`` is [v] int64 ids, ascending, without repetition."""
    if draft_to_target.dtype != torch.int64 or draft_to_target.ndim != 1 or not len(draft_to_target):
        shape = f"{str(draft_to_target.dtype).removeprefix('torch.')} {list(draft_to_target.shape)}"
        raise ValueError(f"{DRAFT_TO_TARGET}{where} is {shape}, and a list of int64 token ids is needed")
    if draft_to_target[0] < 0 or (draft_to_target.diff() <= 0).any():
        raise ValueError(f"{DRAFT_TO_TARGET}{where} does not ascend from 0 on: it holds no token ids in order")
