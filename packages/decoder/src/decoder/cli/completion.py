"""What may follow on a command line, for shells."""

import argparse
from collections.abc import Callable, Mapping

_SCRIPTS = {
    "bash": """_decoder() {
    local IFS=$'\\n'
    COMPREPLY=($(decoder __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _decoder decoder""",
    "fish": """complete -c decoder -a '(decoder __complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'""",
}
_SCRIPTS["zsh"] = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + _SCRIPTS["bash"]


def script(shell: str) -> str:
    """What a shell evaluates at its start: ``eval "$(decoder completion bash)"``."""
    return _SCRIPTS[shell]


def candidates(
    words: list[str],
    commands: Mapping[str, Callable[[type[argparse.ArgumentParser], str], argparse.ArgumentParser]],
    parser: type[argparse.ArgumentParser],
) -> list[str]:
    """The words with which the last one of a command line may go on; none where shells look for files."""
    *before, begun = words or [""]
    if not before:
        found = [*commands, "completion", "--help", "--version"]
    elif before[0] not in commands:
        return []
    else:
        flags = commands[before[0]](parser, before[0])._option_string_actions
        last = flags.get(before[-1])
        if last is not None and last.choices:
            found = [str(one) for one in last.choices]
        elif begun.startswith("-"):
            found = list(flags)
        else:
            return []
    return [one for one in found if one.startswith(begun)]
