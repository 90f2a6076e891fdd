"""ts_eval: compares decoders by speed, acceptance, diversity and losslessness."""
