"""What the commands take for what is not given; free of heavy imports, so that --help is quick."""

SAMPLING = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.1,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.2,
    "penalty_window": 1024,
}
MAX_NEW_TOKENS = 1024
RUNS = 3
OUTPUT = "runs/compare"
REPRODUCE_OUTPUT = "runs/reproduce"
REPRODUCE_RUNS = 5
BENCH_OUTPUT = "runs/bench"
BENCH_PROMPT_TOKENS = 512
BENCH_NEW_TOKENS = 64
BENCH_LENGTHS = (512, 4096, 32768)
BENCH_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
BENCH_REPEATS = 5
NEEDLE_OUTPUT = "runs/needle"
NEEDLE_LENGTHS = (1000, 4000)
NEEDLE_DEPTHS = (0.0, 0.5, 1.0)
NEEDLE_NEW_TOKENS = 24
NEEDLE_PHRASES = 1
EXACTNESS_OUTPUT = "runs/exactness"
EXACTNESS_NEW_TOKENS = 128
EXACTNESS_DRAWS = 500
BOOK_TOKENS = 1024
"""Prompt tokens taken from a shipped book, which is longer than any context."""
PLAN_BUDGET = 4096
"""Slots of the partial cache where no prompt gives them: the paper's."""
PIECE_TOKENS = 64
"""Tokens of the pieces that MAUVE compares."""
