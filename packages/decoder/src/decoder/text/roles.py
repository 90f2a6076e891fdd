"""Who speaks in a chat: the roles that a chat template knows, and names that cannot pass for turns."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from jinja2 import Environment, nodes
from transformers import PreTrainedTokenizerBase

from decoder.checks import shown

_OF_ALL = ("system", "user", "assistant")
# A tag of transformers' own, which marks what the assistant says.
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


def with_known_roles(
    messages: Sequence[Mapping[str, str]], template: str, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, str]]:
    """The messages of a chat as its template takes them: where it does not know ``developer``, that is ``system``.

    Raises:
        ValueError: another role is none that the template knows, or a name is no line of text without control tokens.
        TemplateError: the template is not valid.
    """
    known = known_roles(template)
    taken = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in (*known, "developer"):
            words = f"messages[{index}].role is {shown(role)}, which the chat template does not know"
            raise ValueError(f"{words}: use one of {', '.join(sorted({*known, 'developer'}))}")
        if "name" in message:
            _check_name(message["name"], f"messages[{index}].name", tokenizer)
        taken.append({**message, "role": role if role in known else "system"})
    return taken


@lru_cache
def known_roles(template: str) -> tuple[str, ...]:
    """The roles that all templates know, and those with which this one compares the role of a message."""
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    found = [text for one in tree.find_all(nodes.Compare) if _of_role(one) for text in _texts(one)]
    return tuple(dict.fromkeys([*_OF_ALL, *found]))


def _of_role(comparison: nodes.Compare) -> bool:
    named = [node.name for node in comparison.find_all(nodes.Name)]
    named += [node.attr for node in comparison.find_all(nodes.Getattr)]
    return any(name.endswith("role") for name in [*named, *_keys(comparison)])


def _keys(comparison: nodes.Compare) -> list[str]:
    """The names that a comparison looks up, as in ``message['role']``."""
    looked_up = [node.arg for node in comparison.find_all(nodes.Getitem)]
    return [key.value for key in looked_up if isinstance(key, nodes.Const) and isinstance(key.value, str)]


def _texts(comparison: nodes.Compare) -> Iterable[str]:
    """The texts that something is compared with."""
    keys = _keys(comparison)
    texts = [node.value for node in comparison.find_all(nodes.Const) if isinstance(node.value, str)]
    return [text for text in texts if text not in keys]


def _check_name(name: object, place: str, tokenizer: PreTrainedTokenizerBase) -> None:
    control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if not isinstance(name, str) or not name.isprintable() or any(token in name for token in control):
        raise ValueError(f"{place} must be one line of text without control tokens, not {shown(name)}")
