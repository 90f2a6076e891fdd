"""What a layer's attention costs on this CPU: one softmax over all scores, against blocks merged by log-sum-exp.

    OMP_NUM_THREADS=1 python packages/decoder/benchmarks/attention.py
    OMP_NUM_THREADS=2 python packages/decoder/benchmarks/attention.py --shape 32 8 128 --length 4096

Microseconds per call, the best of many, the caches of several layers read in turn as a step does. One thread is timed
by the CPU time it takes, which other work on the machine hardly disturbs; several are by the clock.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from decoder.backends.attention import _one_softmax, _two_parts, tree_attention

LAYERS = 4
SECONDS = 0.3


def microseconds(call: Callable[..., object], inputs: list[tuple]) -> float:
    """The best time of ``call`` over ``inputs`` among those that fit into `SECONDS`."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = clock()
        for arguments in inputs:
            call(*arguments)
        best = min(best, (clock() - start) / len(inputs))
    return best * 1e6


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=3, type=int, default=(6, 2, 64), metavar=("HEADS", "KV_HEADS", "SIZE"))
    parser.add_argument("--length", nargs="+", type=int, default=(512, 4096, 16384, 65536))
    parser.add_argument("--new", nargs="+", type=int, default=(1, 2, 4, 8, 16, 32, 64, 512))
    args = parser.parse_args()
    heads, groups, dim = args.shape
    print(f"{torch.get_num_threads()} threads, {heads} heads of {dim} over {groups}, float32, microseconds per layer")
    print(f"{'length':>8}{'new':>6}{'scores':>13}{'one softmax':>13}{'blocks':>10}{'shipped':>10}")
    for length in args.length:
        buffers = torch.randn(LAYERS, 2, 1, groups, length + max(args.new), dim)
        for new in args.new:
            blocked = torch.ones(new, new, dtype=torch.bool).triu(1) if new > 1 else None
            views = buffers[:, :, :, :, : length + new]
            triples = [(torch.randn(1, new, heads, dim).transpose(1, 2), *pair) for pair in views]
            times = [microseconds(call, [(*x, blocked, 0.1) for x in triples]) for call in (_one_softmax, _two_parts)]
            times.append(
                microseconds(partial(tree_attention, SimpleNamespace(layer_idx=0)), [(*x, None) for x in triples])
            )
            scores = heads * new * (length + new)
            print(f"{length:8}{new:6}{scores:13,}{times[0]:13.0f}{times[1]:10.0f}{times[2]:10.0f}", flush=True)


if __name__ == "__main__":
    main()
