"""``python -m heads_train``, and ``torchrun ... -m heads_train`` on several nodes."""

import sys

from heads_train.command import main

sys.exit(main())
