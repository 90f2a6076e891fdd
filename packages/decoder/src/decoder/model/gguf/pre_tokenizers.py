"""How byte-level tokenizers split a text before they merge bytes, by the names that ``tokenizer.ggml.pre`` gives it.

The patterns are those of the models' own tokenizers on the hub, which llama.cpp's follow up to what its engine of
regular expressions lacks. A name that is not here is refused, since another pattern makes other tokens in silence.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True)
class Splitting:
    """How a tokenizer splits texts.

    Attributes:
        patterns: what is split off, one after the other, each from what the ones before it left.
        gpt2: whether the rest is split as GPT-2 does.
        whole_words: whether a word that is a token is that token, whatever the merges make of it.
        begins: whether texts begin with the beginning-of-sequence token where the file does not say.
        composed: whether letters and their accents become one character first (NFC), which llama.cpp leaves out.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    whole_words: bool = False
    begins: bool = False
    composed: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)
        return pre_tokenizers.Sequence([*splits, bytes_of]) if splits else bytes_of


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER_CASE_LAST = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_CASE_FIRST = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"

_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_TEKKEN = rf"{_LOWER_CASE_LAST}|{_UPPER_CASE_FIRST}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_BLANKS}"
_GPT_4O = rf"{_LOWER_CASE_LAST}{_ENDINGS}?|{_UPPER_CASE_FIRST}{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_BLANKS}"
_CHINESE_AND_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)
_SEED = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_MINICPM5 = rf"{_ENDINGS}|{_WORD}|\p{{N}}+|{_SIGNS}|{_BLANKS}"

_KINDS = (
    (
        Splitting(gpt2=True),
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
    ),
    (
        Splitting((r"\p{N}",), gpt2=True),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (
        Splitting((_LLAMA3,), whole_words=True, begins=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (Splitting((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (Splitting((_QWEN2,), composed=True), "qwen2 f2llmv2"),
    (Splitting((_QWEN2,)), "deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2"),
    (Splitting((_QWEN35,), composed=True), "qwen35"),
    (Splitting((_TEKKEN,), whole_words=True, begins=True), "tekken"),
    (Splitting((_GPT_4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (
        Splitting((r"\p{N}{1,3}", _CHINESE_AND_JAPANESE, _DEEPSEEK3)),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    (
        Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")),
        "deepseek-coder",
    ),
    (Splitting((_SEED,)), "seed-coder"),
    (Splitting((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (Splitting((r"\p{N}{1,3}", _MINICPM5), whole_words=True), "minicpm5"),
)

SPLITTINGS = {name: splitting for splitting, names in _KINDS for name in names.split()}
"""By their names in files, how byte-level tokenizers split."""
