"""What the linear layers of one pass of a model cost on this CPU, by the number of rows.

    python packages/decoder/benchmarks/linear.py --model data/smollm2

Milliseconds, medians of passes that take turns: PyTorch's own layer, its product with the weights on the left, weights
packed as the decoder packs them, and weights of eight and of four bits, whose inputs are bf16 where the native library
multiplies it. Layers with the same input are one product in all but the first two.
"""

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from decoder.backends.native import packed_linear
from decoder.backends.native.packed_weight import pack
from decoder.model.quantising import QUANTISED_DTYPES, dtype_around, quantise
from decoder.work import finish

ROWS = (1, 2, 3, 4, 6, 8, 9, 16, 32, 64)

Product = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


def milliseconds(product: Product, layers: list, inputs: dict) -> float:
    start = time.perf_counter()
    for layer in layers:
        product(layer, inputs[layer.in_features])
    return (time.perf_counter() - start) * 1e3


def packed_products(model: nn.Module, pack: Callable) -> dict[nn.Module, Callable]:
    packed_linear._packed.clear()
    packed_linear.pack = pack
    return finish(packed_linear.packing(model.modules()))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="Times linear layers by the number of rows.")
    parser.add_argument("--model", type=Path, default=Path("data/reference-model"))
    parser.add_argument("--passes", type=int, default=20)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    packed = packed_products(model, pack)
    names = [name for name, module in model.named_modules() if module in layers]
    around = getattr(torch, dtype_around())
    short = {}
    for dtype in reversed(QUANTISED_DTYPES):
        other = copy.deepcopy(model)
        quantise(other, dtype, around)
        found = packed_products(other, pack)
        short[dtype] = {layer: found[other.get_submodule(name)] for layer, name in zip(layers, names, strict=True)}
    products: dict[str, Product] = {
        "x W^T": lambda layer, x: F.linear(x, layer.weight),
        "W x^T": lambda layer, x: (layer.weight @ x[0].T).T.contiguous(),
        "packed": lambda layer, x: packed[layer](x),
        **{name: partial(lambda products, layer, x: products[layer](x), found) for name, found in short.items()},
    }
    print(f"{torch.get_num_threads()} threads{'rows':>8}" + "".join(f"{name:>10}" for name in products))
    for rows in ROWS:
        inputs = {layer.in_features: torch.randn(1, rows, layer.in_features) for layer in layers}
        narrow = {size: x.to(around) for size, x in inputs.items()}
        times = [
            [milliseconds(one, layers, narrow if name in short else inputs) for name, one in products.items()]
            for _ in range(given.passes)
        ]
        cells = [median(column) for column in zip(*times, strict=True)]
        print(f"{rows:17}" + "".join(f"{cell:10.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
