"""When a training has gone astray, and must end before it writes heads that are worse than none."""

# Untrained heads predict as the model's own last state does; a loss twice theirs is no noise of a batch.
DIVERGED = 2.0
DIVERGED_BATCHES = 10


class TrainingDiverged(ArithmeticError):
    """The loss is not a finite number, or far above that of untrained heads."""


class LossWatch:
    """Raises TrainingDiverged once the loss is no finite number, or far above the first one for many batches.

    Attributes:
        first: the loss of the first batch; None before it.
        high: how many of the last batches in a row were far above it.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.high = 0

    def see(self, loss: float, step: int) -> None:
        """``loss`` is the next batch's, after so many steps."""
        if self.first is None:
            self.first = loss
        self.high = self.high + 1 if loss > DIVERGED * self.first else 0
        if not abs(loss) < float("inf") or self.high == DIVERGED_BATCHES:
            before = "" if step == 0 else f", at the start it was {self.first:.4g}"
            raise TrainingDiverged(
                f"the loss is {loss:.4g} after {step} steps{before}; lower --model.learning_rate and "
                "give another --output (the heads saved last are from before)"
            )
