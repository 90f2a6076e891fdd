"""The test that the native library passes before it draws tokens: they are those of the sampler without it."""

import torch

from decoder.sampling.filters import first_argmax
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import Sampler

_VOCAB, _TOKENS, _SCALE = 2_053, 8, 3.0
_SETTINGS = (
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(min_p=0.05, repetition_penalty=1.3, seed=2),
    SamplingParams(temperature=1.5, repetition_penalty=0.8, seed=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
)


@torch.inference_mode()
def native_choice_fault() -> str | None:
    """Compare tokens from random logits; what is wrong, in words."""
    generator, device = torch.Generator().manual_seed(0), torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for params in _SETTINGS:
            sampler = Sampler(params, _VOCAB, device, list(range(0, _VOCAB, 5)), native=True)
            assert sampler.native is not None
            for _ in range(_TOKENS):
                logits = (torch.randn(_VOCAB, generator=generator) * _SCALE).to(dtype)
                found = sampler.native.highest(logits, len(sampler.context), sampler.window.penalised)
                expected = int(first_argmax(sampler.scores(logits)))
                if found is None or found[0] != expected:
                    return f"it draws {found} where {expected} has the highest score"
                sampler.push(expected)
    return None
