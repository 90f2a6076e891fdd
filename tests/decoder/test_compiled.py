"""What the compiler makes of the kernels, for GPUs that need not be there."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from decoder.backends.cuda.split_kv import Device, launch_shape
from tests.decoder.compile_kernels import GPUS, compiled


def attention(gpu, dtype, heads, groups, dim, new, causal=False):
    shape = dict(heads=heads, groups=groups, dim=dim, new=new, capacity=131_072)
    return dict(shape, gpu=gpu, function="attention", dtype=dtype, causal=causal)


def by_position(gpu, dtype, heads, groups, dim, new=64, capacity=131_072):
    shape = dict(heads=heads, groups=groups, dim=dim, new=new, capacity=capacity)
    return dict(shape, gpu=gpu, function="attention_by_position", dtype=dtype)


def rotary(dtype, dim, new):
    return dict(gpu="H200", function="rotary", dtype=dtype, heads=32, groups=8, dim=dim, new=new)


CALLS = {
    "attention on Hopper": [
        attention("H200", "bfloat16", 32, 8, 128, new=1, causal=True),  # Llama-3.1-8B
        attention("H200", "bfloat16", 32, 8, 128, new=64),
        attention("H200", "bfloat16", 28, 4, 128, new=24),  # Qwen2.5-7B
        attention("H200", "bfloat16", 14, 2, 64, new=24),  # Qwen2.5-0.5B
        attention("H200", "float32", 32, 8, 128, new=1, causal=True),
    ],
    "attention on Ampere": [
        attention("RTX 3090", "bfloat16", 32, 8, 128, new=1),
        attention("RTX 3090", "float64", 32, 8, 64, new=24),
    ],
    "attention by position": [
        by_position("H200", "bfloat16", 32, 8, 128),
        by_position("H200", "bfloat16", 32, 8, 128, new=1, capacity=1000),
        by_position("H200", "bfloat16", 32, 8, 128, new=17, capacity=77),
        by_position("A100", "bfloat16", 9, 3, 64),
        by_position("RTX 3090", "float32", 8, 2, 256),
    ],
    "rotary": [rotary("bfloat16", 128, new=1), rotary("bfloat16", 80, new=24), rotary("float32", 128, new=1)],
}


@pytest.fixture(scope="module")
def kernels():
    """By the names of `CALLS`, what each call's kernels take of a GPU: in one process, whose start takes longest."""
    found = iter(compiled(*(call for calls in CALLS.values() for call in calls)))
    return {name: [next(found) for _ in calls] for name, calls in CALLS.items()}


def attending(kernels, name):
    """What each call's attention kernel takes of a GPU: no more than was foreseen."""
    found = []
    for call, compiled_for_it in zip(CALLS[name], kernels[name], strict=True):
        capability, multiprocessors, shared = GPUS[call["gpu"]]
        (kernel,) = (kernel for kernel in compiled_for_it if kernel["name"] == "attend_split")
        dtype, dim = getattr(torch, call["dtype"]), call["dim"]
        rows = call["new"] * call["heads"] // call["groups"]
        device = Device(multiprocessors, shared, hopper=capability == 90)
        shape = launch_shape(rows, call["groups"], dim, dim, dtype, device)
        assert kernel["warps"] == shape.warps
        assert kernel["shared"] <= min(shape.shared_memory(dim, dim, dtype, device.hopper), shared)
        found.append(kernel)
    return found


def test_attention_for_hopper(kernels):
    step, wide, seven, small, exact = attending(kernels, "attention on Hopper")
    for kernel in (step, wide, seven, small, exact):
        assert kernel["stack"] <= 64, "registers spill"  # a few bytes come and go with Triton's versions
        assert "cp.async.cg" in kernel["instructions"], "keys are not fetched ahead"
    assert "mma.sync" in step["instructions"]
    for kernel in (wide, seven, small):
        assert "wgmma" in kernel["instructions"]
    assert not {"mma.sync", "wgmma", "tf32"} & set(exact["instructions"]), "float32 products are rounded"
    # Two programs of a step run on a multiprocessor, which has 228 KiB and keeps 1 KiB for each.
    assert 2 * (step["shared"] + 1024) <= 228 * 1024


def test_attention_for_ampere(kernels):
    for kernel in attending(kernels, "attention on Ampere"):
        assert "cp.async.cg" in kernel["instructions"]
        # Hopper's own.
        assert "wgmma" not in kernel["instructions"]


def test_rotary_without_spills_and_in_wide_loads(kernels):
    for compiled_for_it in kernels["rotary"]:
        (kernel,) = compiled_for_it
        assert kernel["stack"] == 0, "registers spill"
        assert {"ld.global.v4", "st.global.v4"} <= set(kernel["instructions"])


def test_attention_by_position_is_one_program_for_all_passes_and_caches(kernels):
    """Two versions of a kernel might sum in different orders."""
    whole, one, few, ampere, exact = kernels["attention by position"]
    assert (
        [kernel["code"] for kernel in one] == [kernel["code"] for kernel in whole] == [kernel["code"] for kernel in few]
    )
    for prefix, tail in (whole, ampere, exact):
        assert (prefix["name"], tail["name"]) == ("attend_prefix", "attend_tail")
        assert prefix["stack"] <= 64 and tail["stack"] == 0, "registers spill"
        assert "cp.async.cg" in prefix["instructions"], "keys are not fetched ahead"
    assert "wgmma" in whole[0]["instructions"] and "mma.sync" in ampere[0]["instructions"]
    assert not {"mma.sync", "wgmma", "tf32"} & set(exact[0]["instructions"]), "float32 products are rounded"
