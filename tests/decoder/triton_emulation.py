"""Repairs of Triton 3.6's emulation of kernels on a CPU; nothing where there is a GPU."""

import triton.language as tl
from triton import knobs
from triton.runtime import interpreter


def repair_emulation() -> None:
    """Run-time loop bounds with NumPy from 2.4 on, and products of bfloat16, which it multiplies as the integers of
    their bits."""
    if not knobs.runtime.interpret:
        return
    patch_tensor, multiply = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def multiply_wider(self, left, right, sums, *args):
        if left.dtype.scalar == tl.bfloat16:
            left, right = (self.cast_impl(factor, tl.float32) for factor in (left, right))
        return multiply(self, left, right, sums, *args)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = multiply_wider
