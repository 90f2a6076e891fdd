"""What all tests share."""

import torch

# Tiny models gain nothing from a second thread and wait for it where the machine is busy.
torch.set_num_threads(1)
