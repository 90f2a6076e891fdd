"""The precision that a run trains in where none is given: bfloat16 only where the device multiplies it."""

import torch


def chosen_precision(accelerator: str) -> str:
    """Lightning's ``trainer.precision`` for its ``trainer.accelerator`` on this machine.

    Where a processor has no bfloat16 products PyTorch converts each number on the way: a step of the reference model's
    heads took nine times as long as in float32 on one with AVX2 alone.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    if accelerator in ("auto", "cpu") and torch.cpu._is_avx512_bf16_supported():
        return "bf16-mixed"
    return "32-true"
