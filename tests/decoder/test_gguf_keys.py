"""Every key of a GGUF tokenizer is honoured or refused, and tokens are those that its types and scores make."""

import gguf
import pytest

from decoder.model.gguf.file import open_gguf
from decoder.model.gguf.pre_tokenizers import SPLITTINGS
from decoder.model.gguf.tokenizer import end_tokens, read_tokenizer
from tests.decoder.test_gguf import hf_model, write_gguf  # noqa: F401

SPACE = "\u2581"
PIECES = [SPACE, "a", "b", "s", "o", "t", "bo", "oa", "at", "boat", f"{SPACE}boat", f"{SPACE}b", "é"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "[INST]", "  ", "<|im_end|>"]
TYPES = [2, 3, 3, *(256 * [6]), *(len(PIECES) * [1]), 4, 4, 3]
SCORES = [
    *(259 * [0.0]),
    *(-100.0 - float(i) if len(p) == 1 else -float(20 - len(p)) for i, p in enumerate(PIECES)),
    *(3 * [0.0]),
]


def sentencepiece(path, change=lambda writer: None, scores=SCORES, types=TYPES):
    """A file with a SentencePiece vocabulary of a dozen pieces, and the keys that ``change`` adds."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    if scores is not None:
        writer.add_token_scores(scores)
    if types is not None:
        writer.add_token_types(types)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return open_gguf(path)


def pieces(file, text):
    tokenizer = read_tokenizer(file)
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def test_pieces_merge_by_their_scores_and_other_characters_are_bytes(tmp_path):
    file = sentencepiece(tmp_path / "a.gguf")
    assert pieces(file, "boats") == ["<s>", f"{SPACE}boat", "s"]
    assert pieces(file, "boatboat") == ["<s>", f"{SPACE}boat", "boat"]
    assert pieces(file, "aß\n") == ["<s>", SPACE, "a", "<0xC3>", "<0x9F>", "<0x0A>"]
    tokenizer = read_tokenizer(file)
    for text in ("boats ß\n boat", "é é"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).lstrip() == text


def test_the_score_decides_which_pair_is_merged_first(tmp_path):
    for first, expected in (("bo", ["bo", "a"]), ("oa", ["b", "oa"])):
        scores = [score + 100 * (token == first) for token, score in zip(TOKENS, SCORES, strict=True)]
        file = sentencepiece(tmp_path / f"{first}.gguf", lambda w: w.add_add_space_prefix(False), scores)
        assert pieces(file, "boa") == ["<s>", *expected]


def test_pieces_merge_in_the_order_of_a_list_of_merges(tmp_path):
    """As in Gemma 4's files, whose turns end by a name."""
    bytes_of = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<bos>", "<turn|>", SPACE, "b", "o", "a", "\n", "bo", "oa", f"{SPACE}b", "\n\n", "boa", *bytes_of]
    for order, expected in ((["b o", "o a"], ["boa"]), (["o a", "b o"], ["b", "oa"])):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gemma4")
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_types([3] + 11 * [1] + 256 * [6])
        writer.add_token_merges([*order, f"{SPACE} b", "bo a"])
        writer.add_bos_token_id(0)
        writer.add_add_space_prefix(False)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        file = open_gguf(tmp_path / "a.gguf")
        assert pieces(file, "boa") == ["<bos>", *expected]
        assert pieces(file, " b\n\n\na<turn|>ß") == [
            *("<bos>", f"{SPACE}b", "\n\n", "\n", "a", "<turn|>", "<0xC3>", "<0x9F>"),
        ]
        assert end_tokens(file) == [1]
        tokenizer = read_tokenizer(file)
        assert tokenizer.decode(tokenizer("boa b\nß<turn|>")["input_ids"], skip_special_tokens=True) == "boa b\nß"


@pytest.mark.parametrize("prefix", [True, False, None])
def test_add_space_prefix(tmp_path, prefix):
    def change(writer):
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    file = sentencepiece(tmp_path / "a.gguf", change)
    without = prefix is False
    assert pieces(file, "s") == (["<s>", "s"] if without else ["<s>", SPACE, "s"])
    # As in llama.cpp, text behind a token of its own begins anew.
    assert pieces(file, "s[INST]s")[-2:] == (["[INST]", "s"] if without else [SPACE, "s"])
    tokenizer = read_tokenizer(file)
    assert tokenizer.decode(tokenizer("s boat")["input_ids"], skip_special_tokens=True) == "s boat"


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_add_bos_token_and_add_eos_token(tmp_path, bos, eos):
    def change(writer):
        writer.add_add_bos_token(bos)
        writer.add_add_eos_token(eos)

    file = sentencepiece(tmp_path / "a.gguf", change)
    assert pieces(file, "boat") == [*(["<s>"] if bos else []), f"{SPACE}boat", *(["</s>"] if eos else [])]
    assert len(read_tokenizer(file)("boat", "s")["input_ids"]) == 3 + 2 * (bos + eos)


def test_types_tell_which_tokens_are_found_whole_and_which_are_no_text(tmp_path):
    file = sentencepiece(tmp_path / "a.gguf", lambda writer: writer.add_add_space_prefix(False))
    assert pieces(file, "a[INST]b<|im_end|>s  t") == ["<s>", "a", "[INST]", "b", "<|im_end|>", "s", "  ", "t"]
    tokenizer = read_tokenizer(file)
    ids = tokenizer("a[INST]b<|im_end|>s  t")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a[INST]bs  t"
    plain = sentencepiece(tmp_path / "b.gguf", lambda writer: writer.add_add_space_prefix(False), types=None)
    assert "[INST]" not in pieces(plain, "a[INST]b")


def test_roles_ends_and_templates(tmp_path):
    def change(writer):
        writer.add_bos_token_id(259)
        writer.add_eos_token_id(260)
        writer.add_pad_token_id(0)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 261)
        writer.add_uint32("tokenizer.ggml.fim_pre_token_id", 262)
        writer.add_chat_template([{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}])

    file = sentencepiece(tmp_path / "a.gguf", change)
    tokenizer = read_tokenizer(file)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (259, 260, 0)
    # The last one has a name that ends turns.
    assert end_tokens(file) == [260, 261, TOKENS.index("<|im_end|>")]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "A"
    assert tokenizer.chat_template["tool_use"] == "B"


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (lambda w: w.add_add_sep_token(True), "add_sep_token"),
        (lambda w: w.add_remove_extra_whitespaces(True), "remove_extra_whitespaces"),
        (lambda w: w.add_precompiled_charsmap(b"abc"), "precompiled_charsmap"),
        (lambda w: w.add_array("tokenizer.ggml.suppress_tokens", [1, 2]), "suppress_tokens"),
        (lambda w: w.add_bool("tokenizer.ggml.normalizer.lowercase", True), "normalizer.lowercase"),
        (lambda w: w.add_bool("tokenizer.ggml.reverse_words", True), "reverse_words"),
        (lambda w: w.add_string("tokenizer.ggml.add_bos_token", "yes"), "add_bos_token that is not true or false"),
        (lambda w: w.add_uint32("tokenizer.ggml.bos_token_id", 10**6), "bos_token_id"),
        (lambda w: w.add_array("tokenizer.ggml.added_tokens", ["new"]), "added_tokens"),
        (lambda w: w.add_array("tokenizer.chat_templates", ["tool_use"]), "tool_use"),
    ],
)
def test_a_key_that_is_not_honoured_is_refused_by_its_name(tmp_path, add, words):
    file = sentencepiece(tmp_path / "a.gguf", add)
    with pytest.raises(ValueError) as caught:
        read_tokenizer(file)
    assert words in str(caught.value) and str(file.path) in str(caught.value)


def test_what_changes_nothing_is_taken(tmp_path):
    def change(writer):
        writer.add_add_sep_token(False)
        writer.add_remove_extra_whitespaces(False)
        writer.add_array("tokenizer.ggml.added_tokens", ["[INST]"])
        writer.add_uint32("tokenizer.ggml.mask_token_id", 0)

    assert pieces(sentencepiece(tmp_path / "a.gguf", change), "boat") == ["<s>", f"{SPACE}boat"]


def test_a_vocabulary_that_lacks_a_part_is_refused(tmp_path):
    for scores, words in ((None, "no tokenizer.ggml.scores"), ([0.0], "1 tokenizer.ggml.scores for")):
        with pytest.raises(ValueError, match=words):
            read_tokenizer(sentencepiece(tmp_path / "a.gguf", scores=scores))


# What each kind makes of one text, by hand from the patterns' descriptions.
SPLIT = "it's 12345 Ab\n\n  c"
EXPECTED = {
    "gpt-2": ["it", "'s", "Ġ12345", "ĠAb", "ĊĊĠ", "Ġc"],
    "smollm": ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠAb", "ĊĊĠ", "Ġc"],
    "llama-bpe": ["it", "'s", "Ġ", "123", "45", "ĠAb", "ĊĊ", "Ġ", "Ġc"],
    "qwen2": ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠAb", "ĊĊ", "Ġ", "Ġc"],
    "qwen35": ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠAb", "ĊĊ", "Ġ", "Ġc"],
    "tekken": ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠAb", "ĊĊ", "Ġ", "Ġc"],
    "gpt-4o": ["it's", "Ġ", "123", "45", "ĠAb", "ĊĊ", "Ġ", "Ġc"],
    "deepseek-v3": ["it", "'s", "Ġ", "123", "45", "ĠAb", "ĊĊ", "Ġ", "Ġc"],
    "deepseek-coder": ["it", "'", "s", "Ġ", "1", "2", "3", "4", "5", "ĠAb", "Ċ", "Ċ", "Ġ", "Ġc"],
    "seed-coder": ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠAb", "ĊĊ", "Ġ", "Ġc"],
    "bailingmoe": ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠAb", "ĊĊ", "Ġ", "Ġc"],
    "minicpm5": ["it", "'s", "Ġ", "123", "45", "ĠAb", "ĊĊ", "Ġ", "Ġc"],
}


@pytest.mark.parametrize("name", SPLITTINGS)
def test_each_kind_splits_as_its_family_does(name):
    splitting = SPLITTINGS[name]
    family = next(key for key in EXPECTED if SPLITTINGS[key].patterns == splitting.patterns)
    assert [piece for piece, _ in splitting.pre_tokenizer().pre_tokenize_str(SPLIT)] == EXPECTED[family]


def test_letters_and_accents_become_one_character_where_the_models_tokenizer_does_so(hf_model, tmp_path):  # noqa: F811
    for name, expected in (("qwen2", "Ã©"), ("llama-bpe", "eÌģ")):
        write_gguf(tmp_path / "a.gguf", hf_model, pre=name)
        assert "".join(read_tokenizer(open_gguf(tmp_path / "a.gguf")).tokenize("e\u0301")) == expected


def test_merges_of_tokens_that_are_not_there_are_refused(hf_model, tmp_path):  # noqa: F811
    path = tmp_path / "a.gguf"
    write_gguf(path, hf_model)
    content = path.read_bytes()
    assert content.count("Ġt he".encode()) == 1
    path.write_bytes(content.replace("Ġt he".encode(), "Ġt hz".encode()))
    with pytest.raises(ValueError, match="merges 'Ġt hz'"):
        read_tokenizer(open_gguf(path))


def test_a_word_that_is_a_token_stays_whole_only_where_its_kind_says_so(hf_model, tmp_path):  # noqa: F811
    path, word = tmp_path / "a.gguf", "unusedx"
    for name, expected in (("llama-bpe", [word]), ("qwen2", list(word))):
        write_gguf(path, hf_model, pre=name)
        content = path.read_bytes()
        assert content.count(b"unused9") == 1
        # It has no merges that would make it.
        path.write_bytes(content.replace(b"unused9", word.encode()))
        assert read_tokenizer(open_gguf(path)).tokenize(word) == expected
