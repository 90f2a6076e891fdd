"""Lossless acceleration of ultra-long generation with Hugging Face causal language models."""

from decoder.decoder import Chunk, Decoder, GenerationOutput, load, methods
from decoder.draft_heads import DraftHeads
from decoder.options import TokenSwiftOptions
from decoder.sampling_params import SamplingParams
from decoder.stats import Statistics

__all__ = [
    "Chunk",
    "Decoder",
    "DraftHeads",
    "GenerationOutput",
    "SamplingParams",
    "Statistics",
    "TokenSwiftOptions",
    "load",
    "methods",
]
