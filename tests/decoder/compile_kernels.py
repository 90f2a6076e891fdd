"""Compiles kernels for a GPU that need not be there, and prints what they take of it, as JSON lines.

Run as a script, outside the process of the tests, in which Triton may be emulating: its argument is a list of calls, as
JSON. A call names one of the `GPUS`, its function, and what this file's function of that name takes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

GPUS = {  # capability, multiprocessors, shared memory of a program
    "H200": (90, 132, 227 * 1024),
    "A100": (80, 108, 163 * 1024),
    "RTX 3090": (86, 82, 99 * 1024),
}


def compiled(*calls):
    """Per call, what each of its kernels takes of its GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__)), json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(calls)
    return found


def attention(dtype, heads, groups, dim, new, causal, capacity):
    from decoder.backends.cuda.split_kv import split_kv_attention

    query = torch.empty(1, new, heads, dim, dtype=dtype, device="meta").transpose(1, 2)
    cache = torch.empty(1, groups, capacity, dim, dtype=dtype, device="meta")
    mask = None if causal else torch.empty(new, new, dtype=torch.bool, device="meta")
    split_kv_attention(query, cache, cache, torch.empty(1, dtype=torch.int64, device="meta"), mask, 0.1)


def attention_by_position(dtype, heads, groups, dim, new, capacity):
    from decoder.backends.cuda.bitwise_split_kv import bitwise_split_kv_attention

    query = torch.empty(1, new, heads, dim, dtype=dtype, device="meta").transpose(1, 2)
    cache = torch.empty(1, groups, capacity, dim, dtype=dtype, device="meta")
    tails = torch.empty(new, 97, dtype=torch.int64, device="meta")
    bitwise_split_kv_attention(query, cache, cache, tails, 0.1)


def rotary(dtype, heads, groups, dim, new):
    from decoder.backends.cuda.rotary import rotate

    query, key = (
        torch.empty(1, new, count, dim, dtype=dtype, device="meta").transpose(1, 2) for count in (heads, groups)
    )
    cos, sin = (torch.empty(1, new, dim, dtype=dtype, device="meta") for _ in range(2))
    rotate(query, key, cos, sin)


def usage(kernel):
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", found.stdout + found.stderr).groups()
    ptx = kernel.asm["ptx"]
    looked_for = ("wgmma", "mma.sync", "cp.async.cg", "tf32", "ld.global.v4", "st.global.v4")
    return dict(
        name=kernel.metadata.name,
        code=kernel.hash,
        warps=kernel.metadata.num_warps,
        shared=kernel.metadata.shared,
        registers=int(registers),
        stack=int(stack),
        instructions=[name for name in looked_for if name in ptx],
    )


def main():
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from decoder.backends.cuda import bitwise_split_kv, split_kv

    gpu = ""
    # What was compiled for one device is not taken for another.
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: list(GPUS).index(gpu),
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", GPUS[gpu][0], 32),
        )
    )
    for module in (split_kv, bitwise_split_kv):
        module.device_properties = lambda _: split_kv.Device(*GPUS[gpu][1:], hopper=GPUS[gpu][0] == 90)
    kernels, run = [], JITFunction.run
    # Compiled instead of launched.
    JITFunction.run = lambda *args, **named: kernels.append(run(*args, **{**named, "warmup": True}))
    for call in json.loads(sys.argv[1]):
        kernels.clear()
        gpu = call.pop("gpu")
        functions = attention, attention_by_position, rotary
        function = {each.__name__: each for each in functions}[call.pop("function")]
        function(getattr(torch, call.pop("dtype")), **call)
        print(json.dumps([usage(kernel) for kernel in kernels]), flush=True)


if __name__ == "__main__":
    main()
