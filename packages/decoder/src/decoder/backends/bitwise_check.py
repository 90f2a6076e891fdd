"""The test of whole passes for `backends.bitwise`: a text decoded token by token, verified in a tree, and prefilled."""

from typing import TYPE_CHECKING

import torch

from decoder.cache.full import FullCache
from decoder.sampling.token_tree import TokenTree
from decoder.work import finish

if TYPE_CHECKING:
    from decoder.model.target import Target

_TEXT = 44
_DECODED = 3


@torch.inference_mode()
def model_fault(target: "Target") -> str | None:
    """Compare a text that is decoded token by token with the same text verified in a tree, and prefilled.

    This covers everything else that the model does to a row: norms, rotary embeddings, activations, the user's layers.
    """
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(target.vocab_size, (_TEXT,), generator=generator).tolist()
    start = _TEXT - _DECODED
    with target.patched():
        plain = _cache(target)
        target.prefill(text[:start], plain)
        verified = _cache(target)
        if plain.states:
            target.prefill(text[:start], verified)
        else:
            # That prefill gives the same a second time is shown below.
            copies = finish(plain.copying(start))
            finish(target.beginning_with(verified, copies, start, target.attention_shape_now.dtype))
        steps = []
        for token in text[start:]:
            [seen] = target.forward([TokenTree(token)], [plain])
            steps.append((seen.hidden[0].clone(), seen.logits[0].clone()))
            plain.keep([0])
        # A tree with the same tokens as a path, and other tokens in between.
        tree, path = TokenTree(text[start]), [0]
        for token in text[start + 1 :]:
            for other in range(2):
                tree.add(path[-1], (token + 1 + other) % target.vocab_size, "test")
            path.append(tree.add(path[-1], token, "test"))
        [seen] = target.forward([tree], [verified])
        for alone, node in zip(steps, path, strict=True):
            of_node = seen.hidden[node], seen.logits[node]
            for name, own, in_tree in zip(("hidden states", "logits"), alone, of_node, strict=True):
                if not torch.equal(own, in_tree):
                    return f"a token's {name} have other bits in a tree of {len(tree)} nodes than alone"
        verified.keep(path)
        prefilled = _cache(target)
        target.prefill(text, prefilled)
        for other, words in ((verified, "verified"), (prefilled, "prefilled")):
            kept = (cache.beginning(_TEXT, target.layout.keeping) for cache in (plain, other))
            for mine, theirs in zip(*kept, strict=True):
                if not torch.equal(mine, theirs):
                    return f"a text that is {words} has other keys or values than one that is decoded"
    return None


def _cache(target: "Target") -> FullCache:
    return FullCache(_TEXT + target.width(3 * _DECODED))
