"""What a pass over a tree gives."""

from dataclasses import dataclass

import torch


@dataclass
class Verification:
    """What one forward pass over a tree gives, per node.

    Where passes are recorded these are their outputs themselves, which any other pass writes over.

    Attributes:
        hidden: the last decoder layer's output before the final norm, [T, d].
        logits: [T, V].
        queries: per layer [1, H, T or more, D]; empty unless asked for.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    queries: dict[int, torch.Tensor]

    def detached(self) -> "Verification":
        """A copy that no later pass writes over."""
        queries = {layer: query.clone() for layer, query in self.queries.items()}
        return Verification(self.hidden.clone(), self.logits.clone(), queries)
