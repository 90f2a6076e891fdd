"""What all tests share."""

import gc
import os
import signal
from itertools import count

import torch

# Tiny models gain nothing from a second thread and wait for it where the machine is busy.
torch.set_num_threads(1)

# A shell starts what runs in its background with SIGINT ignored, which the commands under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton emulates its kernels. It looks when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


_begun = count()


def pytest_runtest_setup():
    """Collecting garbage looks at what the last tests have made.

    ts-eval collects before every generation, and to go through all that PyTorch and transformers have imported takes
    half a second each time.
    """
    if next(_begun) % 16 == 0:
        gc.collect()
        gc.freeze()
