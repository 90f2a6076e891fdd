"""The test of recorded passes: a model's passes, recorded and replayed, against the same passes without recording."""

from typing import TYPE_CHECKING

import torch

from decoder.backends.attention import AttentionShape
from decoder.backends.cuda import split_kv
from decoder.backends.cuda.cuda_graphs import WIDEST_RECORDED, CudaGraphs, Recorder
from decoder.backends.fast_paths import RECORDED, SPLIT_KV
from decoder.backends.kernel_check import difference, split_kv_fault
from decoder.cache.full import FullCache
from decoder.sampling.token_tree import TokenTree

if TYPE_CHECKING:
    from decoder.model.target import Target

# Largest allowed error relative to the largest logit, since the kernels round differently in every layer.
_ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.2}
_PROMPT = 5
_NODES = (1, 5)  # a chain, and a tree that is padded
_TIMES = 4  # passes of each kind: one is run, one recorded, and two are replayed while the text grows


def tested_recorder(target: "Target", shape: AttentionShape) -> Recorder | None:
    """A recorder for the target's device, or None if split-KV attention or recording fail their tests there."""
    device, paths = target.device, target.paths
    unavailable = split_kv.unavailable(device)
    if unavailable is not None:
        for name in (SPLIT_KV, RECORDED):
            paths.leave_off(name, unavailable)
        return None
    if not paths.passes_test(SPLIT_KV, shape, lambda: split_kv_fault(shape, device), "in every layer"):
        paths.leave_off(RECORDED, f"needs {SPLIT_KV}")
        return None
    recorders: list[Recorder] = []

    def fault() -> str | None:
        recorders.append(CudaGraphs(device))
        return recorders[0].fault or recording_fault(target, recorders[0])

    key = type(target.model), target.model.config.to_json_string(), shape
    if not paths.passes_test(RECORDED, key, fault, f"passes of up to {WIDEST_RECORDED} tokens"):
        return None
    # If a model like this was tested before, the test was skipped and has made no recorder.
    return recorders[0] if recorders else CudaGraphs(device)


@torch.inference_mode()
def recording_fault(target: "Target", recorder: Recorder) -> str | None:
    """What is wrong with the passes that ``recorder`` replays, or None; the target has no recorder afterwards.

    The passes also use the fast paths that depend on a recorder: caches with their length on the device, and the rotary
    kernel.
    """
    try:
        expected = _logits(target, None)
        actual = _logits(target, recorder)
    finally:
        target.set_recorder(None)
        target.pool.clear()
    if recorder.fault is not None:
        return recorder.fault
    allowed = _ALLOWED.get(expected[0].dtype, 0.2)
    faults = (difference(*pair, allowed) for pair in zip(actual, expected, strict=True))
    return next((fault for fault in faults if fault), None)


def _logits(target: "Target", recorder: Recorder | None) -> list[torch.Tensor]:
    target.set_recorder(recorder)
    tokens = iter(range(10_000))
    size = target.vocab_size
    cache = FullCache(_PROMPT + sum(_TIMES * target.slots(nodes) for nodes in _NODES))
    found = []
    with target.patched():
        target.prefill([next(tokens) % size for _ in range(_PROMPT)], cache)
        for nodes in _NODES:
            for _ in range(_TIMES):
                tree = TokenTree(next(tokens) % size)
                for node in range(nodes - 1):
                    tree.add(node // 2, next(tokens) % size, "test")
                [verification] = target.forward([tree], [cache])
                found.append(verification.logits.clone())
                cache.keep([0, 2] if nodes > 2 else [0])
    return found
