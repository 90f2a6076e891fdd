"""Lightning's trainer with the help of these commands in place of its own, which speaks of much that is not there."""

import lightning as L

# The arguments of each method that are no flags.
NOT_FLAGS = {
    "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"},
    "validate": {"model", "dataloaders", "verbose", "datamodule", "weights_only"},
    "test": {"model", "dataloaders", "verbose", "datamodule", "weights_only"},
}


class Trainer(L.Trainer):
    def fit(self, *args, ckpt_path: str | None = None, **kwargs) -> None:
        """Train heads; a run that was cut goes on.

        Args:
            ckpt_path: the checkpoint to go on from; ``last`` insists on that in --output, taken in any case.
        """
        super().fit(*args, ckpt_path=ckpt_path, **kwargs)

    def validate(self, *args, ckpt_path: str | None = None, **kwargs):
        """Measure heads on the validation text.

        Args:
            ckpt_path: the checkpoint with the heads; ``last`` is the one in --output. Or give --model.heads.
        """
        return super().validate(*args, ckpt_path=ckpt_path, **kwargs)

    def test(self, *args, ckpt_path: str | None = None, **kwargs):
        """Measure heads on the test text.

        Args:
            ckpt_path: the checkpoint with the heads; ``last`` is the one in --output. Or give --model.heads.
        """
        return super().test(*args, ckpt_path=ckpt_path, **kwargs)
