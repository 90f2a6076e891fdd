"""`python -m ts_eval` is `ts-eval`, also where the package is on the path but not installed."""

from ts_eval.cli import main

main()
