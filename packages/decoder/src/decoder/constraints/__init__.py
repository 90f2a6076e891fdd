"""Constraints: what a text may be. JSON schemas, patterns, grammars and choices, and the protocol for one's own."""

from decoder.constraints.base import Constraint, ConstraintError, ConstraintState, Vocabulary
from decoder.constraints.grammars import Grammar, choice, grammar, json_schema, regex

__all__ = [
    "Constraint",
    "ConstraintError",
    "ConstraintState",
    "Grammar",
    "Vocabulary",
    "choice",
    "grammar",
    "json_schema",
    "regex",
]
