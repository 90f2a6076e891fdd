"""The result of verifying a tree."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from decoder.backends.base import PassOutput


@dataclass
class Verification:
    """The outputs of the target for the T nodes of a tree.

    If passes are recorded, these are the buffers of the recording, and any other pass overwrites them.

    Attributes:
        hidden: the output of the last decoder layer, before the final norm, [T, d].
        logits: the logits of the token that follows each node, [T, V].
        queries: by layer, the queries [1, H, T or more, D]; empty unless they were asked for.
        features: as for `PassOutput`, [T, layers x d].
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    queries: Mapping[int, torch.Tensor]
    features: torch.Tensor | None = None

    @classmethod
    def of(cls, output: PassOutput) -> "Verification":
        """The verification that a pass over the nodes has made."""
        if output.logits is None:
            raise ValueError("a pass of the decoder alone verifies nothing: it has no logits")
        return cls(output.hidden, output.logits, output.queries, output.features)
