"""Stages: a listener is told of each, in order and in pairs, and the text is the same."""

import pytest

from decoder import Decoder, TokenSwiftOptions
from decoder.timings import STAGES, listening, stage

from .conftest import random_heads, tiny_llama

WITHIN_A_STEP = set(STAGES) - {"prefill", "step"}
METHODS = {"ar": None, "tokenswift": "chained", "medusa": "independent", "magicdec": None, "eagle3": "eagle3"}


class Tape:
    """All that it is told, and the stages that are open."""

    def __init__(self):
        self.begun, self.open, self.tokens = [], [], 0

    def begin(self, stage):
        self.begun.append((stage, tuple(self.open)))
        self.open.append(stage)

    def end(self, stage, result):
        assert self.open.pop() == stage
        if stage == "step":
            self.tokens += sum(map(len, result.values()))


@pytest.mark.parametrize("method", METHODS)
def test_stages_nest_and_the_text_is_the_same(method):
    model = tiny_llama()
    heads = None if METHODS[method] is None else random_heads(model, kind=METHODS[method])
    dec, tape = Decoder(model, heads=heads), Tape()
    options = TokenSwiftOptions(tree=(2, 1), ngrams=0, budget=20, sink=2)
    arguments = (list(range(30)), 12, method)
    plain = dec.generate(*arguments, options=options, ignore_eos=True)
    with listening(tape):
        heard = dec.generate(*arguments, options=options, ignore_eos=True)
    assert heard.token_ids == plain.token_ids and tape.tokens == 12 and not tape.open
    names = [name for name, _ in tape.begun]
    assert names.index("prefill") < names.index("step") and names.count("step") == heard.stats.steps
    # In each step: drafts, one pass of the model, tokens, the text.
    order = ("propose", "verify", "accept", "commit")
    of_steps = [name for name, around in tape.begun if around == ("step",) and name in order]
    assert of_steps == list(order) * heard.stats.steps
    assert all("step" in around or "prefill" not in names for name, around in tape.begun if name == "sampling")
    drafts = {name for name, around in tape.begun if "step" in around} & {"draft", "scoring"}
    assert bool(drafts) == (method != "ar")


def test_texts_that_are_decoded_together_share_their_steps():
    dec, tape = Decoder(tiny_llama()), Tape()
    with listening(tape):
        outs = dec.generate_batch([[1, 2, 3], [4, 5]], 5, "ar", ignore_eos=True)
    names = [name for name, _ in tape.begun]
    assert names.count("step") == names.count("verify") == 5 and names.count("commit") == 10
    assert tape.tokens == sum(len(out.token_ids) for out in outs) == 10


def test_a_stage_that_fails_has_ended_too():
    ended = []

    class Ends(Tape):
        def end(self, stage, result):
            ended.append((stage, result))

    @stage("draft")
    def divide(by):
        return 1 / by

    with pytest.raises(ZeroDivisionError), listening(Ends()):
        divide(0)
    divide(1)  # nobody listens any more
    with listening(Ends()):
        assert divide(1) == 1
    assert ended == [("draft", None), ("draft", 1.0)]


def test_there_is_one_listener_and_there_are_known_stages():
    with listening(Tape()), pytest.raises(RuntimeError, match="one at a time"), listening(Tape()):
        pass
    with pytest.raises(ValueError, match="no stage 'drafts': use one of prefill"):
        stage("drafts")
