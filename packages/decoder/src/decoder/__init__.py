"""Lossless acceleration of ultra-long generation with Hugging Face causal language models."""

from decoder.auditing import Audit, audit
from decoder.decoder import Chunk, Decoder, GenerationOutput, Request, load, methods
from decoder.draft_heads import DraftHeads
from decoder.options import TokenSwiftOptions, parse_tree
from decoder.sampling_params import SamplingParams
from decoder.stats import Statistics
from decoder.token_tree import rank_paths

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
    "parse_tree",
    "rank_paths",
]
