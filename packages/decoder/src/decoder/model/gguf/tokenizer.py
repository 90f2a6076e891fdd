"""The tokenizer that a file describes, as one of transformers' fast tokenizers.

Of llama.cpp's kinds there are three here: byte-level BPE ("gpt2"), and SentencePiece's BPE with scores ("llama") or
with merges ("gemma4"). Every key of ``tokenizer.ggml`` is honoured or refused, as one that is skipped makes other
tokens in silence.
"""

import re
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoder.model.gguf.file import ELSE, GgufFile, Texts, named
from decoder.model.gguf.pre_tokenizers import SPLITTINGS, Splitting

PREFIX = "tokenizer.ggml."
# The types of tokens; the sixth are bytes.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)
_SPACE = "\u2581"
# The keys of the tokens that have a role, by transformers' names. The separator is spelled as in the format.
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
# What llama.cpp takes where a SentencePiece vocabulary does not say.
_SENTENCEPIECE_ROLES = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
_ENDS = ("eos", "eot", "eom")
# As in llama.cpp, control tokens of these names end a text, also where no key names them.
_NAMED_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<turn|>",
}  # fmt: skip
_READ = {
    f"{PREFIX}{name}"
    for name in (
        "model", "pre", "tokens", "token_type", "scores", "merges", "added_tokens", "add_bos_token", "add_eos_token",
        "add_sep_token", "add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap", "suppress_tokens",
        "normalizer.lowercase", "normalizer.strip_accents", "token_type_count",
    )
}  # fmt: skip
# Keys that would change tokens or choices in ways that nothing here does, when they are true or not empty.
_REFUSED = {
    "add_sep_token": "a separator behind each text",
    "remove_extra_whitespaces": "extra spaces to be removed",
    "precompiled_charsmap": "characters to be replaced by a table",
    "suppress_tokens": "tokens that are never chosen",
    "normalizer.lowercase": "texts in lower case",
    "normalizer.strip_accents": "texts without accents",
}
# Ids of tokens with uses of their own, such as those of infilling, change neither texts nor tokens.
_OTHER_ROLE = re.compile(rf"{re.escape(PREFIX)}[a-z_]+_token_id")


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """The tokenizer of a file. Raises ValueError, with the key, for one that cannot be read or is not known here."""
    _refuse_unknown(file)
    kind, tokens = _kind(file), _tokens(file)
    types = _types(file, tokens)
    types = np.full(len(tokens), _NORMAL) if types is None else types
    if kind == "gpt2":
        splitting = _splitting(file)
        backend = _byte_level(file, tokens, splitting)
    else:
        splitting = Splitting(begins=True)
        backend = _sentencepiece(file, kind, tokens, types)
    _add_tokens(backend, file, tokens, types)
    roles = {name: tokens[token] for name in _ROLES if (token := token_of_role(file, name)) is not None}
    _frame(backend, file, splitting.begins)
    return PreTrainedTokenizerFast(
        tokenizer_object=_Uncopied(backend),
        clean_up_tokenization_spaces=False,
        chat_template=_chat_templates(file),
        model_input_names=["input_ids", "attention_mask"],
        **roles,
    )


class _Uncopied:
    """A tokenizer whose deep copy, which transformers makes, is itself: copying takes as long as reading."""

    def __init__(self, backend: Tokenizer):
        self.backend = backend

    def __deepcopy__(self, memo: dict) -> Tokenizer:
        return self.backend


def token_count(file: GgufFile) -> int:
    """How many tokens the file's vocabulary has; 0 if it has none."""
    tokens = file.get(f"{PREFIX}tokens", Texts)
    return 0 if tokens is None else len(tokens)


def token_of_role(file: GgufFile, role: str) -> int | None:
    """The id of ``bos_token`` or another of transformers' special tokens; None if there is none.

    Raises ValueError if the file names a token that is not in its vocabulary.
    """
    token = file.get(f"{PREFIX}{_ROLES[role]}", int)
    if token is None and file.metadata.get(f"{PREFIX}model") == "llama":
        token = _SENTENCEPIECE_ROLES.get(role)
    if token is not None and not 0 <= token < token_count(file):
        # Some converters write 2**32 - 1 for none.
        if token == 2**32 - 1 and role != "eos_token":
            return None
        raise ValueError(
            f"{file.path} names token {token} of {token_count(file)} as its {PREFIX}{_ROLES[role]}: {ELSE}"
        )
    return token


def end_tokens(file: GgufFile) -> list[int]:
    """The ids of the tokens at which a text ends, beginning with the end-of-sequence id.

    Raises ValueError if the file names a token that is not in its vocabulary.
    """
    count = token_count(file)
    ends = [file.get(f"{PREFIX}{name}_token_id", int) for name in _ENDS]
    for name, token in zip(_ENDS, ends, strict=True):
        if count and token is not None and not 0 <= token < count:
            raise ValueError(f"{file.path} ends texts with token {token} of {count} ({PREFIX}{name}_token_id): {ELSE}")
    texts = file.get(f"{PREFIX}tokens", Texts)
    if texts is not None and (types := _types(file, texts)) is not None:
        control = np.flatnonzero(types[:count] == _CONTROL).tolist()
        named = {text: i for i in control if (text := texts[i]) in _NAMED_ENDS}
        if {"<|return|>", "<|call|>"} <= named.keys():
            # There, <|end|> stands behind each part of an answer.
            named.pop("<|end|>", None)
        ends += sorted(named.values())
    return list(dict.fromkeys(token for token in ends if token is not None))


def _refuse_unknown(file: GgufFile) -> None:
    for name, meaning in _REFUSED.items():
        value = file.metadata.get(f"{PREFIX}{name}", False)
        if len(value) if isinstance(value, np.ndarray | Texts | str) else value:
            raise ValueError(f"{file.path} asks for {meaning} ({PREFIX}{name}), which is not done here: {ELSE}")
    for key in file.metadata:
        if key.startswith(PREFIX) and key not in _READ and not _OTHER_ROLE.fullmatch(key):
            raise ValueError(
                f"{file.path} has the key {named(key)}, which is unknown here and may change tokens: {ELSE}"
            )


def _kind(file: GgufFile) -> str:
    kind = file.get(f"{PREFIX}model", str)
    if kind not in ("gpt2", "llama", "gemma4"):
        found = f"has a tokenizer of the kind {named(kind)}" if kind else f"has no {PREFIX}model"
        raise ValueError(f"{file.path} {found}, and 'gpt2', 'llama' and 'gemma4' are read: {ELSE}")
    return kind


def _tokens(file: GgufFile) -> list[str]:
    texts = file.get(f"{PREFIX}tokens", Texts)
    if not texts:
        raise ValueError(f"{file.path} has no {PREFIX}tokens: {ELSE}")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    if len(set(tokens)) < len(tokens):
        twice = next(token for token, times in Counter(tokens).items() if times > 1)
        raise ValueError(f"{file.path} has the token {named(twice)} twice in {PREFIX}tokens: {ELSE}")
    return tokens


def _numbers(file: GgufFile, name: str, count: int) -> np.ndarray | None:
    numbers = file.get(f"{PREFIX}{name}", np.ndarray)
    if numbers is not None and len(numbers) < count:
        raise ValueError(f"{file.path} has {len(numbers)} {PREFIX}{name} for {count} tokens: {ELSE}")
    return numbers


def _types(file: GgufFile, tokens: Texts | list[str]) -> np.ndarray | None:
    """The types of the tokens; None if the file does not say."""
    types = _numbers(file, "token_type", len(tokens))
    if types is None or file.metadata.get(f"{PREFIX}model") != "gemma4":
        return types
    types = types.copy()
    # As in llama.cpp, these are found whole whatever their type is in the file.
    for i, token in enumerate(tokens):
        if token in _NAMED_ENDS:
            types[i] = _CONTROL
        elif len(token) > 1 and not token.strip("\n"):
            types[i] = _USER_DEFINED
    return types


def _splitting(file: GgufFile) -> Splitting:
    name = file.get(f"{PREFIX}pre", str)
    if name not in SPLITTINGS:
        found = "names no pre-tokenizer" if name is None else f"names the pre-tokenizer {named(name)}"
        raise ValueError(f"{file.path} {found} ({PREFIX}pre), which is unknown here: {ELSE}")
    if file.get(f"{PREFIX}add_space_prefix", bool, False):
        raise ValueError(
            f"{file.path} asks for a space before each text ({PREFIX}add_space_prefix), which a byte-level tokenizer "
            f"does not add: {ELSE}"
        )
    return SPLITTINGS[name]


def _byte_level(file: GgufFile, tokens: list[str], splitting: Splitting) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, _pairs(file, vocabulary), ignore_merges=splitting.whole_words))
    if splitting.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitting.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The two parts of each merge."""
    texts = file.get(f"{PREFIX}merges", Texts)
    if texts is None:
        raise ValueError(f"{file.path} has no {PREFIX}merges, which its tokenizer needs: {ELSE}")
    # There are more than a hundred thousand: no line of Python's for each.
    pairs: list[Any] = [tuple(text.split(" ", 1)) for text in texts]
    parts = chain(chain.from_iterable(pairs), map("".join, pairs))
    if set(map(len, pairs)) <= {2} and all(map(vocabulary.__contains__, parts)):
        return pairs
    pairs = []
    for text in texts:
        # As in llama.cpp, a space at the beginning belongs to the first part.
        cut = text.find(" ", 1)
        pair = text[:cut], text[cut + 1 :]
        if cut < 0 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ValueError(
                f"{file.path} merges {named(text)} ({PREFIX}merges), which is not in its vocabulary: {ELSE}"
            )
        pairs.append(pair)
    return pairs


def _sentencepiece(file: GgufFile, kind: str, tokens: list[str], types: np.ndarray) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = token_of_role(file, "unk_token")
    model = models.BPE(
        vocabulary,
        _merges(file, tokens, vocabulary, types) if kind == "llama" else _pairs(file, vocabulary),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prefixed = file.get(f"{PREFIX}add_space_prefix", bool, kind == "llama")
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    pieces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*pieces, decoders.Strip(" ", 1, 0)] if prefixed else pieces)
    return backend


def _merges(file: GgufFile, tokens: list[str], vocabulary: dict[str, int], types: np.ndarray) -> list[tuple[str, str]]:
    """The merges that make a SentencePiece vocabulary's tokens, those of the highest score first."""
    scores = _numbers(file, "scores", len(tokens))
    if scores is None:
        raise ValueError(f"{file.path} has no {PREFIX}scores, which its SentencePiece tokenizer needs: {ELSE}")
    merges = []
    made = np.flatnonzero((types[: len(tokens)] == _NORMAL) | (types[: len(tokens)] == _UNUSED))
    for i in made[np.argsort(-scores[made].astype(np.float64), kind="stable")].tolist():
        token = tokens[i]
        for cut in range(len(token) - 1, 0, -1):
            first = token[:cut]
            if first in vocabulary and (second := token[cut:]) in vocabulary:
                merges.append((first, second))
    return merges


def _add_tokens(backend: Tokenizer, file: GgufFile, tokens: list[str], types: np.ndarray) -> None:
    """Have the tokens found whole in a text that stand for no text (special ones) or that users have defined."""
    known = set(tokens)
    added = list(file.get(f"{PREFIX}added_tokens", Texts) or ())
    for text in added:
        if text not in known:
            raise ValueError(
                f"{file.path} adds the token {named(text)} ({PREFIX}added_tokens), which has no id: {ELSE}"
            )
    # Phi-3's own take the spaces behind them along, which no key says.
    sentencepiece_of_phi3 = file.architecture == "phi3" and file.metadata[f"{PREFIX}model"] == "llama"
    special = []
    for i in np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist():
        alone = not sentencepiece_of_phi3 or tokens[i] in ("<unk>", "<s>", "<|endoftext|>")
        special.append(AddedToken(tokens[i], special=True, normalized=False, rstrip=not alone))
    backend.add_special_tokens(special)
    defined = [tokens[i] for i in np.flatnonzero(types == _USER_DEFINED).tolist()]
    plain = [AddedToken(text, special=False, normalized=False) for text in dict.fromkeys((*defined, *added))]
    backend.add_tokens(plain)


def _frame(backend: Tokenizer, file: GgufFile, begins: bool) -> None:
    """Have texts begin and end with the tokens that the file asks for."""
    frame, ids = ["$A"], []
    for name, default, at in (("bos", begins, 0), ("eos", False, 2)):
        if not file.get(f"{PREFIX}add_{name}_token", bool, default):
            continue
        token = token_of_role(file, f"{name}_token")
        if token is None:
            raise ValueError(
                f"{file.path} asks for a token around each text ({PREFIX}add_{name}_token) and has no "
                f"{PREFIX}{name}_token_id: {ELSE}"
            )
        text = str(backend.id_to_token(token))
        frame.insert(at, text)
        ids.append((text, token))
    if ids:
        backend.post_processor = processors.TemplateProcessing(
            single=frame,
            pair=[*frame, *(f"{'$B' if part == '$A' else part}:1" for part in frame)],
            special_tokens=list(dict(ids).items()),
        )


def _chat_templates(file: GgufFile) -> str | dict[str, str] | None:
    """The chat template, or the templates by their names where the file has several."""
    template = file.get("tokenizer.chat_template", str)
    names = file.get("tokenizer.chat_templates", Texts)
    if names is None:
        return template
    templates = {} if template is None else {"default": template}
    for name in names:
        text = file.get(f"tokenizer.chat_template.{name}", str)
        if text is None:
            raise ValueError(f"{file.path} lists a chat template {named(name)} (tokenizer.chat_templates) and has none")
        templates[name] = text
    return templates
