"""Compiles the attention kernels for a GPU that need not be there, and prints what they take of it, as JSON lines.

Run as a script, outside the process of the tests, in which Triton may be emulating: arguments are a device, its compute
capability included, and a list of calls, as JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from decoder import split_kv


def compile_call(call, device):
    """The kernels that a call of `split_kv_attention` launches, compiled instead of launched."""
    dtype = getattr(torch, call["dtype"])
    heads, groups, new, dim = call["heads"], call["groups"], call["new"], call["dim"]
    query = torch.empty(1, new, heads, dim, dtype=dtype, device="meta").transpose(1, 2)
    cache = torch.empty(1, groups, call["capacity"], dim, dtype=dtype, device="meta")
    mask = None if call["causal"] else torch.empty(new, new, dtype=torch.bool, device="meta")
    kernels = []
    run = JITFunction.run
    split_kv.device_properties = lambda _: device
    JITFunction.run = lambda *args, **kwargs: kernels.append(run(*args, **{**kwargs, "warmup": True}))
    try:
        split_kv.split_kv_attention(query, cache, cache, torch.empty(1, dtype=torch.int64, device="meta"), mask, 0.1)
    finally:
        JITFunction.run = run
    return kernels


def usage(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", found.stdout + found.stderr).groups()
    ptx = kernel.asm["ptx"]
    return dict(
        name=kernel.metadata.name,
        warps=kernel.metadata.num_warps,
        shared=kernel.metadata.shared,
        registers=int(registers),
        stack=int(stack),
        instructions=[name for name in ("wgmma", "mma.sync", "cp.async.cg", "tf32") if name in ptx],
    )


def main():
    device, calls = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    capability = device.pop("capability")
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target)
    )
    for call in calls:
        for kernel in compile_call(call, split_kv.Device(hopper=capability == 90, **device)):
            print(json.dumps({**call, **usage(kernel)}), flush=True)


if __name__ == "__main__":
    main()
