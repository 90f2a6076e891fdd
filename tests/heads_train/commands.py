"""Runs `heads-train` once for each argument, its flags as JSON, in one process: to start it takes longest."""

import json
import sys

from heads_train.cli import main

if __name__ == "__main__":
    for flags in map(json.loads, sys.argv[1:]):
        if status := main(flags):
            sys.exit(status)
