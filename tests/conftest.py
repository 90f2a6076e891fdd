"""What all tests share."""

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
