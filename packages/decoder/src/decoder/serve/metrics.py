"""What `/metrics` tells, in Prometheus' text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from decoder.serve.service import Counts
from decoder.serve.worker import Worker
from decoder.stats import Statistics

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class Metrics(Counts):
    """The server's counters; each server has a registry of its own."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.requests = Counter("tokenswift_requests", "Answered requests", ["path", "status"], registry=self.registry)
        self.running = Gauge("tokenswift_texts_running", "Texts being decoded", registry=self.registry)
        self.waiting = Gauge("tokenswift_texts_waiting", "Texts in the queue", registry=self.registry)
        self.prompt_tokens = Counter("tokenswift_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.reused_tokens = Counter(
            "tokenswift_reused_tokens", "Tokens of prompts taken over from earlier texts", registry=self.registry
        )
        self.generated_tokens = Counter("tokenswift_generated_tokens", "New tokens", registry=self.registry)
        self.steps = Counter("tokenswift_steps", "Steps, summed over texts", registry=self.registry)
        self.drafted = Counter("tokenswift_drafted_tokens", "Depths of the drafted trees", registry=self.registry)
        self.accepted = Counter(
            "tokenswift_accepted_tokens", "Drafted tokens that were accepted", registry=self.registry
        )
        self.first = Histogram(
            "tokenswift_first_token_seconds",
            "From the request to its first piece",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.seconds = Histogram(
            "tokenswift_request_seconds", "From the request to its end", buckets=_SECONDS, registry=self.registry
        )

    def watch(self, worker: Worker) -> None:
        """Read what runs and waits from ``worker`` whenever the metrics are asked for."""
        self.running.set_function(lambda: worker.running)
        self.waiting.set_function(lambda: worker.waiting)

    def submitted(self, prompt_tokens: int) -> None:
        """Count the tokens of a request's prompts."""
        self.prompt_tokens.inc(prompt_tokens)

    def finished(self, statistics: Statistics) -> None:
        """Count a text that has ended."""
        self.generated_tokens.inc(statistics.generated)
        self.reused_tokens.inc(statistics.reused_tokens)
        self.steps.inc(statistics.steps)
        self.drafted.inc(statistics.drafted)
        self.accepted.inc(statistics.accepted)

    def text(self) -> bytes:
        return generate_latest(self.registry)
