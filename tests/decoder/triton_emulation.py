"""Repairs of Triton 3.6's emulation of kernels on a CPU; nothing where there is a GPU."""

import triton.language as tl
from triton import knobs
from triton.runtime import interpreter


def repair_emulation() -> None:
    """Run-time loop bounds with NumPy from 2.4 on, and products.

    It multiplies bfloat16 as the integers of their bits; and on some processors the bits of a row of NumPy's products
    follow from its place. Functions that kernels call are made ready once and not in every call, which is half of the
    time.
    """
    if not knobs.runtime.interpret or hasattr(interpreter, "_repaired"):
        return
    interpreter._repaired = True
    patch_tensor = interpreter._patch_lang_tensor
    call, ready = interpreter.InterpretedFunction.__call__, set()

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def multiply_wider(self, left, right, sums, *args):
        if left.dtype.scalar == tl.bfloat16:
            left, right = (self.cast_impl(factor, tl.float32) for factor in (left, right))
        total = sums.data.copy()
        for column in range(left.data.shape[-1]):
            total += left.data[..., column, None] * right.data[..., column, None, :]
        return interpreter.TensorHandle(total, sums.dtype.scalar)

    def call_ready(self, *args, **kwargs):
        # What is changed in its module's language stays so.
        if self.fn.__module__ in ready:
            return self.rewrite()(*args, **kwargs)
        ready.add(self.fn.__module__)
        return call(self, *args, **kwargs)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = multiply_wider
    interpreter.InterpretedFunction.__call__ = call_ready
