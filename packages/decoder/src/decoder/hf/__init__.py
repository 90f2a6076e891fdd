"""The decoder as the decoding loop of transformers' own `generate`."""

from decoder.hf.custom_generate import CustomGenerate, custom_generate

__all__ = ["CustomGenerate", "custom_generate"]
