"""What the linear layers of one pass of the reference model cost on this CPU, by the number of rows.

    python packages/decoder/benchmarks/linear.py

Milliseconds, medians of many passes: PyTorch's own layer, its product with the weights on the left, and packed weights.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from decoder.kernels.packed_linear import packed_layers

MODEL = Path("data/reference-model")
ROWS = (1, 2, 4, 8, 16, 32, 64)
PASSES = 100


def milliseconds(product: Callable[[nn.Linear, torch.Tensor], torch.Tensor], layers: list, inputs: dict) -> float:
    times = []
    for _ in range(PASSES):
        start = time.perf_counter()
        for layer in layers:
            product(layer, inputs[layer.in_features])
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


@torch.inference_mode()
def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    packed = packed_layers(layers)
    products = {
        "x W^T": lambda layer, x: F.linear(x, layer.weight),
        "W x^T": lambda layer, x: (layer.weight @ x[0].T).T.contiguous(),
        "packed": lambda layer, x: packed[layer](x),
    }
    print(f"{torch.get_num_threads()} threads{'rows':>8}" + "".join(f"{name:>10}" for name in products))
    for rows in ROWS:
        inputs = {layer.in_features: torch.randn(1, rows, layer.in_features) for layer in layers}
        cells = [milliseconds(product, layers, inputs) for product in products.values()]
        print(f"{rows:17}" + "".join(f"{cell:10.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
