"""What users import from `decoder`."""

from decoder import constraints
from decoder.auditing import Audit, audit
from decoder.decoder import Decoder, methods
from decoder.draft_heads import DraftHeads
from decoder.eagle3.draft_model import Eagle3DraftModel
from decoder.heads import load_heads
from decoder.hf import custom_generate
from decoder.loader import load
from decoder.options import TokenSwiftOptions, parse_tree
from decoder.outputs import BatchError, Chunk, GenerationOutput, Request
from decoder.request import BatchRequest, GenerationRequest
from decoder.sampling.params import SamplingParams
from decoder.sampling.token_tree import rank_paths
from decoder.stats import Statistics

__all__ = [
    "Audit",
    "BatchError",
    "BatchRequest",
    "Chunk",
    "Decoder",
    "DraftHeads",
    "Eagle3DraftModel",
    "GenerationOutput",
    "GenerationRequest",
    "Request",
    "SamplingParams",
    "Statistics",
    "TokenSwiftOptions",
    "audit",
    "constraints",
    "custom_generate",
    "load",
    "load_heads",
    "methods",
    "parse_tree",
    "rank_paths",
]
