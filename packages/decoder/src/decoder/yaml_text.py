"""YAML from outside: a key that is twice in a mapping is refused; PyYAML takes the last one in silence."""

from typing import Any

import yaml

from decoder.checks import TWICE, check, shown


class _Twice(Exception):
    """A key that is twice in a mapping.

    Args:
        key: as it is written.
        line: of the second one, counted from 1.
    """

    def __init__(self, key: str, line: int):
        self.key, self.line = key, line


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # Here a mapping has what is written in it; later also what it merges in with <<, which it may write anew.
        node = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _Twice(key.value, key.start_mark.line + 1)
                seen.add((key.tag, key.value))
        return node


def parse_yaml(text: str, name: str) -> Any:
    """The value of a YAML text.

    Args:
        text: the YAML.
        name: how an error's message calls it, for instance "run.yaml".

    Raises:
        ValueError: it is no YAML; a key is twice in a mapping; or a number or a text is one that `check` refuses.
    """
    try:
        content = yaml.load(text, _Loader)
    except _Twice as error:
        raise ValueError(f"{shown(error.key)} in line {error.line} of {name} {TWICE}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    check(content, name)
    return content
