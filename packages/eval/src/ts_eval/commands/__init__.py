"""What all commands share: flags, files of flags, errors in one sentence, what a terminal shows."""
