"""What stands for llama-cpp-python in tests: its classes' names, arguments and order of calls, over made-up logits."""

import sys
import types

import numpy as np

VOCABULARY = 320


class Llama:
    """Logits are a function of the last token, and high for three of the tests' prompts.

    One with ``biased`` keeps every drafted token that is not filtered; ``made`` is what all were made with.
    """

    made: list[dict]
    biased = False

    def __init__(self, model_path, *, draft_model=None, **named):
        self.made.append({"path": model_path, "draft_model": draft_model, **named})
        self.draft_model, self.seed = draft_model, None
        self.read: list[int] = []
        self.ctx = self

    def reset(self):
        self.read = []

    def set_seed(self, seed):
        self.seed = seed

    def eval(self, tokens):
        self.read += tokens

    def n_vocab(self):
        return VOCABULARY

    def logits(self, text):
        logits = np.random.default_rng(text[-1]).normal(size=VOCABULARY)
        logits[1:4] += 5
        return logits.astype(np.float32)

    def probabilities(self, text, temp, top_k, top_p, min_p, repeat_penalty):
        assert (top_p, min_p, repeat_penalty) == (1.0, 0.0, 1.0)
        logits = self.logits(text).astype(np.float64)
        kept = np.argsort(-logits)[: 1 if temp == 0 else top_k or VOCABULARY]
        weights = np.zeros(VOCABULARY)
        weights[kept] = np.exp((logits[kept] - logits[kept].max()) / (temp or 1))
        return weights / weights.sum()

    def generate(self, tokens, temp=0.8, top_k=40, top_p=1.0, min_p=0.0, repeat_penalty=1.0):
        random, text, draft = np.random.default_rng(self.seed), list(tokens), []
        while True:
            for place in range(len(draft) + 1):
                share = self.probabilities(text, temp, top_k, top_p, min_p, repeat_penalty)
                token = int(random.choice(VOCABULARY, p=share))
                if self.biased and place < len(draft) and share[draft[place]]:
                    token = int(draft[place])
                text.append(token)
                yield token
                if place < len(draft) and token != draft[place]:
                    break
            draft = [] if self.draft_model is None else self.draft_model(np.array(text, dtype=np.intc))


class LlamaPromptLookupDecoding:
    """Drafts what followed the last token before, where it came first."""

    def __call__(self, input_ids, /, **named):
        places = np.nonzero(input_ids[:-1] == input_ids[-1])[0]
        return input_ids[places[0] + 1 :][:5] if len(places) else np.array([], dtype=np.intc)


def last_logits(llama, place):
    assert place == -1
    return np.ctypeslib.as_ctypes(llama.logits(llama.read))


def install(monkeypatch, biased=False):
    """Have it imported as llama_cpp until the test ends; returns what its models are made with."""
    module, speculative = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama_speculative")
    made: list[dict] = []
    module.Llama = type("Llama", (Llama,), {"made": made, "biased": biased})
    module.__version__ = "0.0.1"
    module.llama_get_logits_ith = last_logits
    speculative.LlamaPromptLookupDecoding = LlamaPromptLookupDecoding
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    return made
