"""Lossless acceleration of ultra-long generation with Hugging Face causal language models."""

from decoder.auditing import Audit, audit
from decoder.decoder import Chunk, Decoder, GenerationOutput, Request, load, methods
from decoder.draft_heads import DraftHeads
from decoder.options import TokenSwiftOptions
from decoder.sampling_params import SamplingParams
from decoder.stats import Statistics

__all__ = [
    "Audit",
    "Chunk",
    "Decoder",
    "DraftHeads",
    "GenerationOutput",
    "Request",
    "SamplingParams",
    "Statistics",
    "TokenSwiftOptions",
    "audit",
    "load",
    "methods",
]
