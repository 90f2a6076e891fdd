"""Which backend runs a model: the one of its device, if it can and if its passes are the reference's."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.backends.base import BackendFault, Chain, PassBackend, PassBatch, PassOutput, Tree
from decoder.backends.check import Expected, backend_fault
from decoder.backends.faults import in_words, warn_of_fault
from decoder.backends.forwards import replaced
from decoder.backends.native.backend import NativeBackend
from decoder.backends.reference.backend import Reference
from decoder.cache.full import FullCache
from decoder.sampling.token_tree import TokenTree
from decoder.work import Work

if TYPE_CHECKING:
    from decoder.model.target import Target

FLATTENED = "texts in one pass"
BITWISE = "bit for bit"
TESTS = "tests at load"
# A relative error of logits above that of half precision and below that of another function of them.
_TOLERANCE = 0.02


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
        name: of what may be used here.
        on: whether it is.
        reason: what it is used for, or why it is not.
    """

    name: str
    on: bool
    reason: str


class Chosen(NamedTuple):
    """The backend of a model, and why it is not the one of its device, where it is not."""

    backend: PassBackend
    of_device: str
    why_not: str | None


def on_cuda(device: torch.device) -> bool:
    """Whether passes run on CUDA, whose backend is imported only then."""
    return device.type == "cuda"


def choosing(target: "Target", expected: Expected | None) -> Work[Chosen]:
    """Find the backend of a model. A fault is told in a warning.

    ``expected`` is what the reference gives; None if it is known already that the backend gives the same.
    """
    kind: type
    if on_cuda(target.device):
        from decoder.backends.cuda.backend import CudaBackend

        kind = CudaBackend
    else:
        kind = NativeBackend
    why_not: str | None = kind.unavailable(target)
    if why_not is None:
        try:
            backend: PassBackend = kind(target)
            yield from backend.renewing()
            why_not = None if expected is None else backend_fault(target, backend, expected)
            why_not = why_not or backend.fault
        except torch.OutOfMemoryError:
            raise
        except BackendFault as error:
            return Chosen((yield from _reference(target, kind.name, str(error))), kind.name, str(error))
        except Exception as error:
            # Compilers, drivers and interpreters raise many unrelated types for one fact.
            why_not = in_words(error)
        if why_not is None:
            if backend.flattens is None:
                backend.flattens = runs_flattened(target, backend)
            # What was recorded is not worth its memory.
            target.pool.clear()
            return Chosen(backend, kind.name, None)
        warn_of_fault(kind.name, target.device, why_not)
    return Chosen((yield from _reference(target, kind.name, why_not)), kind.name, why_not)


def _reference(target: "Target", of_device: str, why: str) -> Work[Reference]:
    reference = Reference(target, f"it needs the {of_device}, off here: {why}")
    yield from reference.renewing()
    reference.flattens = runs_flattened(target, reference)
    return reference


@torch.inference_mode()
def runs_flattened(target: "Target", backend: PassBackend) -> bool:
    """Whether several sequences can be run in one pass, each over its own cache, with the same result as alone."""
    trees = [TokenTree(0), TokenTree(1 % target.vocab_size)]
    trees[0].add(0, 0, "test")

    def verified(together: bool) -> list[PassOutput]:
        backend.flattens = together
        caches = [FullCache(length + backend.width(2)) for length in (3, 1)]
        for cache in caches:
            length = cache.capacity - backend.width(2)
            backend.run(PassBatch([Chain([0] * length, 0, cache)], False))
            cache.keep(range(length))
        sequences = [Tree(tree, cache) for tree, cache in zip(trees, caches, strict=True)]
        return [backend.run(PassBatch(sequences, True))]

    try:
        with replaced(backend.called):
            pairs = zip(verified(together=True), verified(together=False), strict=True)
            return all(
                bool((a.logits.double() - b.logits.double()).norm() <= _TOLERANCE * b.logits.double().norm())
                for a, b in pairs
            )
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError):
        # Some models process keys between cache and attention, where flattened passes have tuples of tensors.
        return False
