"""`model.generate(custom_generate=decoder.custom_generate(...))`: transformers' own text, or a sentence why not."""

import re
import threading
import time

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.cache.argument import cache_named

from ..tiny import byte_tokenizer
from .conftest import VOCAB, random_heads, tiny_llama

# Each is honoured by a processor of transformers' own.
ASKED = [
    dict(),
    dict(repetition_penalty=1.3),
    dict(no_repeat_ngram_size=2),
    dict(no_repeat_ngram_size=3, repetition_penalty=1.2, suppress_tokens=[3, 17]),
    dict(bad_words_ids=[[5], [6, 7]], begin_suppress_tokens=[1, 2, 4]),
    dict(eos_token_id=[11, 20, 30, 40], min_new_tokens=12, pad_token_id=0),
    dict(sequence_bias=[[[9], 4.0], [[8, 9], -6.0]], encoder_repetition_penalty=1.2, renormalize_logits=True),
    dict(prefix_allowed_tokens_fn=lambda batch, ids: range(int(ids[-1]) % 3, VOCAB, 3)),
    dict(eos_token_id=11, exponential_decay_length_penalty=(5, 1.2), forced_eos_token_id=11, pad_token_id=0),
]


@pytest.fixture(scope="module")
def ids(prompt):
    return torch.tensor([prompt])


@pytest.fixture(scope="module")
def hook(model):
    return decoder.custom_generate(random_heads(model))


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: ",".join(asked) or "plain")
def test_greedy_tokens_are_transformers_own(model, ids, hook, asked):
    expected = model.generate(ids, max_new_tokens=40, do_sample=False, **asked)
    assert model.generate(ids, max_new_tokens=40, do_sample=False, custom_generate=hook, **asked).equal(expected)


@pytest.mark.parametrize("method", ["ar", "tokenswift", "medusa", "prompt-lookup", None])
def test_sampled_tokens_are_those_of_the_decoder(model, dec, ids, method):
    fields = dict(temperature=0.8, top_k=20, top_p=0.95, min_p=0.02, eta_cutoff=1e-3, repetition_penalty=1.2)
    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, ()))
    sampling = SamplingParams(**fields, penalty_window=4096, seed=seed, suppress_tokens=(4,))
    expected = dec.generate(ids, 60, "ar", sampling)
    hook = decoder.custom_generate(dict(dec.heads), method, TokenSwiftOptions(tree=(2, 2)))
    torch.manual_seed(5)
    asked = dict(do_sample=True, suppress_tokens=[4], max_new_tokens=60, custom_generate=hook)
    assert model.generate(ids, **fields, **asked)[0, ids.shape[1] :].tolist() == expected.token_ids
    assert model.generate(ids, **fields, **asked)[0, ids.shape[1] :].tolist() != expected.token_ids


def test_filters_that_the_decoder_lacks_are_run_by_transformers_own_classes(model, ids, hook):
    asked = dict(do_sample=True, top_k=0, typical_p=0.3, epsilon_cutoff=0.02, renormalize_logits=True)
    out = model.generate(
        ids, max_new_tokens=40, custom_generate=hook, output_scores=True, return_dict_in_generate=True, **asked
    )
    drawn = torch.stack(out.scores)[:, 0].gather(1, out.sequences[0, ids.shape[1] :, None])
    assert drawn.isfinite().all()
    # The filters leave few tokens, so that tokens drawn without them would nearly surely be among those dropped.
    assert (torch.stack(out.scores).isfinite().sum(-1) < VOCAB // 2).all()


def test_scores_logits_and_the_output_are_transformers_own(model, ids, hook):
    asked = dict(max_new_tokens=12, do_sample=False, repetition_penalty=1.2, no_repeat_ngram_size=2)
    asked |= dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    expected, out = model.generate(ids, **asked), model.generate(ids, custom_generate=hook, **asked)
    assert type(out) is type(expected) is GenerateDecoderOnlyOutput
    assert out.sequences.equal(expected.sequences)
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(out, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(ours, theirs)
    only = model.generate(ids, custom_generate=hook, **{**asked, "output_scores": False, "output_logits": False})
    assert only.scores is only.logits is None and only.sequences.equal(expected.sequences)


def test_a_padded_batch_is_transformers_own(model, hook):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(1, VOCAB, (3, 20), generator=generator)
    mask = torch.ones_like(rows)
    mask[1, :7] = rows[1, :7] = 0
    mask[2, :19] = rows[2, :19] = 0
    asked = dict(max_new_tokens=30, do_sample=False, eos_token_id=[7, 13], pad_token_id=0, repetition_penalty=1.1)
    expected = model.generate(rows, attention_mask=mask, **asked)
    assert (expected[:, -1] == 0).any(), "no row ends before the others"
    assert model.generate(rows, attention_mask=mask, custom_generate=hook, **asked).equal(expected)
    several = model.generate(
        rows[:1], custom_generate=hook, do_sample=True, num_return_sequences=3, max_new_tokens=10, top_k=0
    )
    assert several.shape == (3, 30) and len({tuple(row) for row in several.tolist()}) == 3
    alone = model.generate(rows[1:2], attention_mask=mask[1:2], **asked)
    assert model.generate(rows[1:2], attention_mask=mask[1:2], custom_generate=hook, **asked).equal(alone)


class Counting(StoppingCriteria):
    """Stops after some calls: it has a state, so that it must be called once for each token and in order."""

    def __init__(self, calls):
        self.calls, self.lengths = calls, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.tensor([len(self.lengths) == self.calls])


def test_stopping_criteria_see_each_token_once(model, ids, hook):
    criteria = Counting(9)
    out = model.generate(ids, max_new_tokens=40, do_sample=False, custom_generate=hook, stopping_criteria=[criteria])
    assert out.equal(model.generate(ids, max_new_tokens=9, do_sample=False))
    assert criteria.lengths == list(range(ids.shape[1] + 1, ids.shape[1] + 10))


def test_max_time_ends_a_generation(model, ids, hook):
    began = time.process_time()
    out = model.generate(ids, max_new_tokens=4000, do_sample=False, max_time=0.2, custom_generate=hook)
    assert ids.shape[1] < out.shape[1] < 4000 and time.process_time() - began < 5


@pytest.fixture(scope="module")
def speaking():
    return tiny_llama(vocab_size=256), byte_tokenizer()


def test_stop_strings_end_where_transformers_ends_them(speaking):
    model, tokenizer = speaking
    inputs = tokenizer("Call me", return_tensors="pt")
    asked = dict(max_new_tokens=60, do_sample=False)
    text = tokenizer.decode(model.generate(**inputs, **asked)[0, inputs["input_ids"].shape[1] + 5 :])
    # Whole characters, since half of one is no string to stop at.
    stop = re.search(r"[!-~]{2}", text)[0]
    expected = model.generate(**inputs, **asked, stop_strings=[stop], tokenizer=tokenizer)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 60
    hook = decoder.custom_generate(tokenizer=tokenizer)
    assert model.generate(**inputs, **asked, stop_strings=[stop], custom_generate=hook).equal(expected)
    criteria = [StopStringCriteria(tokenizer, [stop])]
    assert model.generate(**inputs, **asked, stopping_criteria=criteria, custom_generate=hook).equal(expected)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(**inputs, **asked, stop_strings=[stop], custom_generate=decoder.custom_generate())


def test_a_text_iterator_streamer_streams_and_ends(speaking):
    model, tokenizer = speaking
    inputs = tokenizer("Call me", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    hook = decoder.custom_generate(streamer=streamer)
    asked = dict(max_new_tokens=50, do_sample=False, custom_generate=hook)
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **asked})
    thread.start()
    text = "".join(streamer)
    thread.join(timeout=60)
    expected = model.generate(**inputs, max_new_tokens=50, do_sample=False)
    assert text == tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :])


class Recording(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended += 1


def test_a_streamer_gets_what_generate_gives_it_and_ends_after_an_error(model, ids):
    ours, theirs = Recording(), Recording()
    model.generate(ids, max_new_tokens=8, do_sample=False, streamer=theirs)
    model.generate(ids, max_new_tokens=8, do_sample=False, custom_generate=decoder.custom_generate(streamer=ours))
    assert ours.values == theirs.values and ours.ended == theirs.ended == 1
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(ids, num_beams=2, custom_generate=decoder.custom_generate(streamer=ours))
    assert ours.ended == 2


class Unknown(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def filled_cache(model, ids):
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], **cache_named(model, cache))
    return cache


REFUSED = {
    "num_beams": dict(num_beams=2),
    "penalty_alpha": dict(penalty_alpha=0.6, top_k=4),
    "dola_layers": dict(dola_layers="low"),
    "prompt_lookup_num_tokens": dict(prompt_lookup_num_tokens=3),
    "guidance_scale": dict(guidance_scale=1.5),
    "Unknown": dict(logits_processor=[Unknown()]),
    "output_attentions": dict(output_attentions=True, return_dict_in_generate=True),
    "output_hidden_states": dict(output_hidden_states=True, return_dict_in_generate=True),
    "keeps a cache of its own": dict(past_key_values=filled_cache),
    "position_ids": dict(position_ids=lambda model, ids: torch.arange(ids.shape[1])[None] + 3),
    "inputs_embeds": dict(inputs_embeds=lambda model, ids: model.get_input_embeddings()(ids)),
    "attention_mask": dict(attention_mask=lambda model, ids: torch.tensor([[1] * (ids.shape[1] - 1) + [0]])),
    "positions of the model": dict(max_new_tokens=5000),
    "NoRepeatNGram": dict(num_return_sequences=2, do_sample=True, no_repeat_ngram_size=2),
    "Counting": dict(num_return_sequences=2, do_sample=True, stopping_criteria=[Counting(3)]),
    "output_scores": dict(num_return_sequences=2, do_sample=True, output_scores=True, return_dict_in_generate=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_named(model, ids, hook, name):
    asked = {key: value(model, ids) if callable(value) else value for key, value in REFUSED[name].items()}
    given = {} if "inputs_embeds" in asked else dict(inputs=ids)
    with pytest.raises(ValueError, match=name) as error:
        model.generate(**given, **{"max_new_tokens": 4, **asked}, custom_generate=hook)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given", [dict(heads=3), dict(streamer=print), dict(tokenizer="gpt2"), dict(method="faster")], ids=str
)
def test_wrong_arguments_end_in_a_sentence(model, ids, given):
    with pytest.raises(ValueError, match=next(iter(given))):
        model.generate(ids, max_new_tokens=2, custom_generate=decoder.custom_generate(**given))


def test_a_generation_config_of_the_users_own_is_honoured(model, ids, hook):
    config = GenerationConfig(max_length=ids.shape[1] + 9, do_sample=False, repetition_penalty=1.4)
    expected = model.generate(ids, generation_config=config)
    assert model.generate(ids, generation_config=config, custom_generate=hook).equal(expected)
    assert expected.shape[1] == ids.shape[1] + 9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_int8_model_of_torchao_is_its_own_backbone(ids, dtype):
    """Skipped unless torchao is installed, which transformers then imports, with warnings, in every process."""
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_llama(dtype)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))
    plain = decoder.custom_generate(method="ar")
    drafted = decoder.custom_generate(random_heads(model), "tokenswift", TokenSwiftOptions(tree=(2, 2)))
    asked = dict(max_new_tokens=30, do_sample=False)
    ours = model.generate(ids, custom_generate=plain, **asked)
    if dtype == torch.float32:
        assert ours.equal(model.generate(ids, **asked))
    assert model.generate(ids, custom_generate=drafted, **asked).equal(ours)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "quantised", [dict(load_in_4bit=True), dict(load_in_8bit=True, llm_int8_threshold=0.0)], ids="-".join
)
def test_a_model_of_bitsandbytes_is_its_own_backbone(ids, tmp_path, quantised):
    """Skipped unless bitsandbytes and accelerate are installed."""
    pytest.importorskip("bitsandbytes")
    tiny_llama(torch.float32, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(**quantised)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    drafted = decoder.custom_generate(random_heads(model), "tokenswift", TokenSwiftOptions(tree=(2, 2)))
    asked = dict(max_new_tokens=30, do_sample=False)
    assert model.generate(ids, custom_generate=drafted, **asked).equal(model.generate(ids, **asked))
    assert not drafted.decoder.bitwise  # the native library does not multiply its codes


@pytest.mark.parametrize("as_object", [False, True])
def test_products_whose_rows_depend_on_each_other_are_refused(as_object):
    """Outliers of LLM.int8() are columns that any token of a pass makes one, so drafts would change the text."""
    model, settings = tiny_llama(torch.float32), dict(quant_method="bitsandbytes", load_in_8bit=True)
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True) if as_object else settings
    with pytest.raises(ValueError, match=r"llm_int8_threshold=0\.0"):
        Decoder(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_lora_adapter_is_part_of_the_backbone(ids, dtype):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = tiny_llama(dtype)
    before = base.generate(ids, max_new_tokens=30, do_sample=False)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    hook = decoder.custom_generate(random_heads(base), "tokenswift", TokenSwiftOptions(tree=(2, 2)))
    asked = dict(input_ids=ids, max_new_tokens=30, do_sample=False)
    expected = model.generate(**asked)
    assert not expected.equal(before), "the adapter changes nothing"
    assert model.generate(**asked, custom_generate=hook).equal(expected)
    with model.disable_adapter():
        # The same decoder: what an adapter does is looked at in each generation.
        assert model.generate(**asked, custom_generate=hook).equal(before)
    inner = Decoder(model.get_base_model())
    assert inner.generate(ids, 30, sampling=SamplingParams(temperature=0)).token_ids == expected[0, 40:].tolist()


@pytest.mark.filterwarnings("ignore")
def test_virtual_tokens_are_refused(ids):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="virtual tokens"):
        model.generate(input_ids=ids, max_new_tokens=3, custom_generate=decoder.custom_generate())
