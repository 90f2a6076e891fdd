"""What all tests share."""

import gc
import os
import signal

import torch

# Tiny models gain nothing from a second thread and wait for it where the machine is busy.
torch.set_num_threads(1)

# A shell starts what runs in its background with SIGINT ignored, which the commands under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton emulates its kernels. It looks when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup():
    """Collecting garbage looks at what the test itself has made.

    ts-eval collects before every generation, and to go through all that PyTorch and transformers have imported takes
    half a second each time.
    """
    gc.collect()
    gc.freeze()
