"""Who speaks in a chat: the roles that a chat template knows, and names that cannot pass for turns."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from decoder.checks import shown

_OF_ALL = ("system", "user", "assistant")
_BEFORE = ((), ("user",), ("user", "assistant"), ("system", "user"))
"""What may stand before a message with a role, in the chats with which a template is tried."""
_NOBODY = "\ue000"  # a role that no template knows, of one private character
_SPECIAL = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"), "")
# A tag of transformers' own, which marks what the assistant says.
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")


def with_known_roles(
    messages: Sequence[Mapping[str, Any]], template: str, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The messages of a chat as its template takes them: where it does not know ``developer``, that is ``system``.

    Raises:
        ValueError: another role is none that the template knows, or a name is no line of text without control tokens.
        TemplateError: the template is not valid.
    """
    taken = []
    for index, message in enumerate(messages):
        role = message["role"]
        known = knows(template, role)
        if not known and role != "developer":
            words = f"messages[{index}].role is {shown(role)}, which the chat template does not know"
            raise ValueError(f"{words}: use one of {', '.join(sorted({*known_roles(template), 'developer'}))}")
        if "name" in message:
            _check_name(message["name"], f"messages[{index}].name", tokenizer)
        taken.append({**message, "role": role if known else "system"})
    return taken


@lru_cache
def knows(template: str, role: str) -> bool:
    """Whether a template does something else for a role than for one that nobody has.

    That is tried: a template may compare roles, look them up in a mapping, or pass them to a macro. Where it only
    writes them down, so that any would do, it knows none.
    """
    if role in _OF_ALL:
        return True
    if not role:
        return False

    def rendered(before: tuple[str, ...], last: str) -> str:
        chat = [{"role": one, "content": "0"} for one in (*before, last)]
        try:
            [text], _ = render_jinja_template([chat], chat_template=template, add_generation_prompt=True, **_SPECIAL)
        except Exception as error:
            # Templates raise errors of any type where they do not take a chat.
            text = f"{type(error)} {error}"
        # Templates may change the case of what they write down.
        return text.replace(_NOBODY, role).casefold()

    return any(rendered(before, role) != rendered(before, _NOBODY) for before in _BEFORE)


@lru_cache
def known_roles(template: str) -> tuple[str, ...]:
    """The roles that all templates know, and those among the texts and names of this one that it knows."""
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    texts = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    texts += [node.key for node in tree.find_all(nodes.Keyword)]
    found = [text for text in texts if re.fullmatch(r"\w[\w-]*", text) and knows(template, text)]
    return tuple(dict.fromkeys([*_OF_ALL, *found]))


def _check_name(name: object, place: str, tokenizer: PreTrainedTokenizerBase) -> None:
    control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if not isinstance(name, str) or not name.isprintable() or any(token in name for token in control):
        raise ValueError(f"{place} must be one line of text without control tokens, not {shown(name)}")
