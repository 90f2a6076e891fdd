"""The walk that the device takes by itself is the host's own, token for token, and the host reads from it once."""

from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.drafters.levels import HeadLevels, ranked_tokens
from decoder.drafters.tuning.level_policy import LevelPolicy
from decoder.engine import Engine
from decoder.model.target import Target
from decoder.sampling import host_rows
from decoder.sampling.acceptance import exact, walk
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.sampling.tree_draws import TreeDraws

from .conftest import VOCAB, clocked, drafted_levels, random_heads, some, take, tiny_llama

CPU = torch.device("cpu")
WORDS = 20
COLLECTED = dict(collect_logprobs=True, collect_top_logprobs=4)
SAMPLERS = {
    "plain": SamplingParams(seed=1),
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(seed=2, temperature=0.6),
    "top-k": SamplingParams(seed=3, top_k=4),
    "top-p": SamplingParams(seed=4, top_p=0.7),
    "min-p": SamplingParams(seed=5, min_p=0.2),
    "eta": SamplingParams(seed=6, eta_cutoff=0.05),
    "suppressed": SamplingParams(seed=7, suppress_tokens=(0, 7, 19)),
    "all filters": SamplingParams(
        seed=8, temperature=1.2, top_k=15, top_p=0.95, min_p=0.01, eta_cutoff=1e-3, repetition_penalty=1.1
    ),
    **{
        f"window {size}": SamplingParams(seed=9, min_p=0.02, repetition_penalty=2.0, penalty_window=size)
        for size in (0, 1, 2, 3, 8, 1024)
    },
    "greedy, window 2": SamplingParams(temperature=0, repetition_penalty=3.0, penalty_window=2),
}


def drawn_whole(tree, logits, sampler):
    """The walk over tokens that the device has drawn for all nodes, read once."""
    draws = TreeDraws(tree, logits, sampler)
    draws.read(draws.numbers.tolist())
    return walk(tree, draws)


def random_logits(nodes, generator, ties):
    logits = torch.randn(nodes, WORDS, generator=generator, dtype=torch.float64) * 2
    return logits.round() if ties else logits


def grown_tree(params, context, depth, logits, generator):
    """A tree whose longest path is what the target says, ``depth`` deep, among up to two wrong nodes per level.

    Grown with ``exact`` for trees of one node, which is plain decoding. A path drafted right ends in a wrong token.
    """
    sampler, tree, node = Sampler(params, WORDS, CPU, context), TokenTree(context[-1]), 0
    for _ in range(depth):
        for _ in range(int(torch.randint(3, (), generator=generator))):
            tree.add(node, int(torch.randint(WORDS, (), generator=generator)), "wrong")
        node = tree.add(node, sampler.take(sampler.draw(logits[node])), "right")
    for _ in range(3):
        parent = int(torch.randint(len(tree), (), generator=generator))
        tree.add(parent, int(torch.randint(WORDS, (), generator=generator)), "wrong")
    return tree


def state(sampler):
    """All that later choices depend on, and what the user gets."""
    window = sampler.draft_context().in_window()
    return sampler.context, None if window is None else window.tolist(), sampler.logprobs, sampler.top_logprobs


@pytest.mark.parametrize("params", SAMPLERS.values(), ids=SAMPLERS)
def test_the_devices_walk_is_the_hosts(params):
    """Paths from 0 to 25 deep, texts shorter and longer than the window, ties; and the state fits a fresh sampler's."""
    generator = torch.Generator().manual_seed(0)
    for case, depth in enumerate((0, 1, 3, 6, 7, 8, 9, 15, 16, 25)):
        context = torch.randint(WORDS, (1 + case % 6 * 3,), generator=generator).tolist()
        logits = random_logits(4 + 3 * depth, generator, ties=case % 2)
        tree = grown_tree(params, context, depth, logits, generator)
        samplers = [Sampler(params, WORDS, CPU, context, **COLLECTED) for _ in range(2)]
        expected = take(exact, tree, logits, samplers[0])
        assert len(expected[0]) > depth
        # Rows behind those of the nodes are of no interest.
        padding = torch.full((5, WORDS), torch.nan, dtype=torch.float64)
        padded = torch.cat((logits[: len(tree)], padding))
        assert take(drawn_whole, tree, padded, samplers[1]) == expected
        assert state(samplers[1]) == state(samplers[0])
        assert state(samplers[1])[:2] == state(Sampler(params, WORDS, CPU, samplers[0].context))[:2]
        assert all(type(number) is int for walked in expected for number in walked)


@pytest.mark.parametrize("name", ["plain", "top-p", "eta", "window 3", "all filters"])
def test_nodes_that_are_drawn_one_by_one_are_those_drawn_together(name):
    generator = torch.Generator().manual_seed(8)
    logits = random_logits(40, generator, ties=True)
    tree = grown_tree(SAMPLERS[name], [4, 9, 2], 7, logits, generator)
    sampler = Sampler(SAMPLERS[name], WORDS, CPU, [4, 9, 2], **COLLECTED)
    one_by_one, together = (TreeDraws(tree, logits, sampler, apart=apart).numbers for apart in (True, False))
    torch.testing.assert_close(one_by_one, together)


@pytest.mark.parametrize("name", ["plain", "window 1", "window 3", "window 1024"])
def test_an_end_in_the_middle_takes_no_more_tokens(name):
    params, generator = SAMPLERS[name], torch.Generator().manual_seed(1)
    context = [4, 4, 9, 2]
    logits = random_logits(40, generator, ties=False)
    tree = grown_tree(params, context, 11, logits, generator)
    for last in range(1, 13):
        results = []
        for rule in (exact, drawn_whole):
            sampler, seen = Sampler(params, WORDS, CPU, context, **COLLECTED), []

            def ends(token, seen=seen, sampler=sampler, last=last):
                # The token is in the text when it is told.
                assert sampler.context == [*context, *seen, token]
                seen.append(token)
                return len(seen) == last

            walked = take(rule, tree, logits, sampler, ends)
            assert len(walked[1]) == len(walked[0]) == last and seen == walked[1]
            assert state(sampler)[:2] == state(Sampler(params, WORDS, CPU, sampler.context))[:2]
            # What comes next is drawn from the same state, whichever way.
            results.append((walked, state(sampler), take(exact, TokenTree(0), logits, sampler)))
        assert results[0] == results[1]


@pytest.mark.parametrize("params", SAMPLERS.values(), ids=SAMPLERS)
def test_steps_of_either_walk_and_tokens_of_the_hosts_own_mix(params):
    generator = torch.Generator().manual_seed(2)
    mixed, host = (Sampler(params, WORDS, CPU, [5, 1]) for _ in range(2))
    for step in range(24):
        logits = random_logits(20, generator, ties=step % 3 == 0)
        tree = grown_tree(params, host.context, step % 4, logits, generator)
        rule = exact if step % 3 == 1 else drawn_whole
        assert take(rule, tree, logits, mixed) == take(exact, tree, logits, host)
        if step % 5 == 0:
            mixed.push(step % WORDS)
            host.push(step % WORDS)
        drafted = host.context[-(step % 5) :]
        assert state(mixed) == state(host)
        for coupled in (False, True):
            scores = [
                sampler.draft_scores(logits[:2], coupled, sampler.draft_context(drafted)) for sampler in (mixed, host)
            ]
            assert torch.equal(*scores)


@pytest.mark.parametrize("bad, words", [(torch.nan, "logits hold NaN"), (-torch.inf, "no token is left")])
def test_impossible_logits_are_told_where_they_are_visited_only(bad, words):
    params, generator = SAMPLERS["window 3"], torch.Generator().manual_seed(3)
    logits = random_logits(60, generator, ties=False)
    tree = grown_tree(params, [1, 2], 12, logits, generator)
    path, tokens = take(exact, tree, logits, Sampler(params, WORDS, CPU, [1, 2]))
    for node in range(len(tree)):
        spoilt, results = logits.index_fill(0, torch.tensor([node]), bad), []
        for rule in (exact, drawn_whole):
            sampler = Sampler(params, WORDS, CPU, [1, 2])
            if node in path:
                with pytest.raises(ValueError, match=words):
                    take(rule, tree, spoilt, sampler)
                assert sampler.context[2:] == tokens[: path.index(node)]
            else:
                assert take(rule, tree, spoilt, sampler) == (path, tokens)
            results.append(state(sampler))
        assert results[0] == results[1]


def test_impossible_logits_behind_an_end_are_no_error():
    logits = torch.zeros(3, WORDS, dtype=torch.float64)
    logits[0, 4] = 9.0
    logits[1:] = torch.nan
    tree = TokenTree(0)
    tree.add_path([4, 4], "right")
    sampler = Sampler(SAMPLERS["greedy"], WORDS, CPU, [0])
    assert take(drawn_whole, tree, logits, sampler, lambda token: True) == ([0], [4])


@pytest.mark.parametrize("params", SAMPLERS.values(), ids=SAMPLERS)
def test_where_a_walk_ended_the_device_knows_as_well_as_the_host(params):
    """The last node, the newest token, and what is ahead of it: the same penalty window, the same noise."""
    generator = torch.Generator().manual_seed(7)
    for case, depth in enumerate((0, 1, 2, 3, 5, 7, 7, 7)):
        context = torch.randint(WORDS, (1 + case * 2 % 7,), generator=generator).tolist()
        logits = random_logits(8 + 3 * depth, generator, ties=False)
        tree = grown_tree(params, context, depth, logits, generator)
        # Other nodes may be deeper than the walk comes.
        for _ in range(case % 3):
            tree.add(len(tree) - 1, 3, "wrong")
        sampler, host = (Sampler(params, WORDS, CPU, context) for _ in range(2))
        with HostReads() as counter:
            draws = TreeDraws(tree, logits, sampler)
            behind = draws.draft_context
            _ = draws.last_node, behind.noise(2)
        assert counter.reads == 0
        path, tokens = take(exact, tree, logits, host)
        assert len(path) > depth
        assert (draws.last_node.tolist(), behind.newest().tolist()) == (path[-1:], tokens[-1:])
        assert behind.in_window() is None or torch.equal(behind.in_window(), host.draft_context().in_window())
        assert torch.equal(behind.noise(2), host.draft_context().noise(2))
        # Drafts behind it go on as they do behind a text, but that none leaves the window.
        before = host.draft_context().in_window()
        behind.push(torch.tensor([4]))
        assert behind.newest().tolist() == [4]
        assert torch.equal(behind.noise(1), host.draft_context([4]).noise(1))
        assert torch.equal(behind.noise(1), host.draft_context().noise(1, skip=1))
        if before is not None:
            assert torch.equal(behind.in_window(), before.index_fill(0, torch.tensor([4]), True))


@pytest.mark.parametrize("name", ["window 1", "window 3", "window 8"])
def test_drafted_tokens_that_the_host_has_not_read_slide_the_window_as_others_do(name):
    sampler = Sampler(SAMPLERS[name], WORDS, CPU, [5, 1, 5])
    known, unread = sampler.draft_context(), sampler.draft_context()
    for token in (1, 7, 1, 3, 7, 7, 2, 5, 9, 3):
        drafted = torch.tensor([token])
        unread.push(drafted)
        known.push(token)
        # The same tensor, since to make another one of it the host would have to wait.
        assert unread.newest() is drafted and known.newest().tolist() == [token]
        assert torch.equal(unread.in_window(), known.in_window())


@pytest.fixture
def on_device(monkeypatch):
    """Generations draw whole trees on the device, as they do on CUDA; the list fills with what the host read per step,
    from the verification on."""
    reads, launch = [], Engine._accept

    def counted(*args):
        with HostReads() as counter:
            walks = launch(*args)
        reads.append(counter.reads)
        return walks

    monkeypatch.setattr(Target, "draws_whole_trees", True)
    monkeypatch.setattr(Engine, "_accept", counted)
    return reads


GENERATIONS = {
    "sampled": SamplingParams(seed=2, min_p=0.1, repetition_penalty=1.2, penalty_window=1024),
    "short window": SamplingParams(seed=3, top_p=0.9, repetition_penalty=1.5, penalty_window=3),
    "greedy": SamplingParams(temperature=0),
}


# A tree that no clock steers.
PAPER = TokenSwiftOptions(tree=(1, 3, 3, 3), ngrams=20)


@pytest.mark.parametrize(
    "name, kind",
    some(
        product(GENERATIONS, ["chained", "gated"]),
        [("sampled", "gated"), ("short window", "chained"), ("greedy", "chained")],
    ),
)
def test_generations_that_walk_on_the_device_are_plain_decoding(model, prompt, request, name, kind):
    sampling = GENERATIONS[name]
    heads = random_heads(model, kind=kind, seed=2)
    dec = Decoder(model, heads=heads, draft_model=tiny_llama(seed=2, num_hidden_layers=1))
    plain = dec.generate(prompt, 30, "ar", sampling, return_logprobs=True)
    stop = plain.token_ids[20]
    stopped = plain.token_ids[: plain.token_ids.index(stop) + 1]
    reads = request.getfixturevalue("on_device")
    for method in ("ar", "tokenswift", "tokenswift-fused", "medusa", "triforce", "prompt-lookup", "auto"):
        reads.clear()
        out = dec.generate(prompt, 30, method, sampling, PAPER, return_logprobs=True, top_logprobs=4)
        assert (out.token_ids, out.finish_reason) == (plain.token_ids, "length")
        assert out.logprobs == pytest.approx(plain.logprobs)
        assert len(reads) == out.stats.steps
        if method in ("tokenswift", "medusa"):
            assert out.stats.accepted > 0
            assert set(reads) == {1}
        out = dec.generate(prompt, 30, method, sampling, PAPER, stop=[stop])
        assert (out.token_ids, out.finish_reason) == (stopped, "stop")


READING = [
    *product(("medusa", "tokenswift-fused", "auto"), ("chained", "gated")),
    *product(("suffix", "prompt-lookup"), ["chained"]),  # which read no heads
]


@pytest.mark.parametrize(
    "name, method, kind",
    some(
        [(name, *case) for name, case in product(GENERATIONS, READING)],
        [("sampled", *case) for case in READING] + [("short window", "auto", "gated"), ("greedy", "auto", "chained")],
    ),
)
def test_a_step_reads_once(model, prompt, monkeypatch, name, method, kind):
    """Drafts of heads come with the tokens drawn in the step before them."""
    sampling = GENERATIONS[name]
    # By the machine's clock heads may not pay, and `auto` would not ask for them ahead.
    clocked(monkeypatch, 0.02)
    monkeypatch.setattr(LevelPolicy, "tokens", lambda policy, first, levels: 9.0**levels)
    monkeypatch.setattr(LevelPolicy, "_choose", lambda policy: None)
    step, reads = Engine.step, []

    def counted(engine):
        with HostReads() as counter:
            stepped = step(engine)
        reads.append(counter.reads)
        return stepped

    monkeypatch.setattr(Target, "draws_whole_trees", True)
    monkeypatch.setattr(Engine, "step", counted)
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    plain = dec.generate(prompt, 25, "ar", sampling)
    assert reads == [1] * 25
    reads.clear()
    out = dec.generate(prompt, 25, method, sampling, PAPER)
    assert out.token_ids == plain.token_ids
    assert len(reads) == out.stats.steps
    if method == "auto":
        # It then asks level by level in steps for which it did not ask ahead.
        assert reads.count(1) > len(reads) / 2
    else:
        assert set(reads) == {1}


@pytest.mark.parametrize("kind", ["chained", "independent", "conditioned", "gated"])
@pytest.mark.parametrize("window", [0, 1024])
def test_drafts_asked_for_ahead_are_those_asked_for_afterwards(model, prompt, on_device, monkeypatch, kind, window):
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    sampling = SamplingParams(seed=4, min_p=0.05, repetition_penalty=1.3, penalty_window=window)
    outs = [dec.generate(prompt, 60, "medusa", sampling, PAPER)]
    monkeypatch.setattr("decoder.engine.DraftsAhead", type(None))
    outs.append(dec.generate(prompt, 60, "medusa", sampling, PAPER))
    assert outs[0].stats.accepted_by_depth == outs[1].stats.accepted_by_depth
    assert outs[0].stats.steps == outs[1].stats.steps < 60


def test_walks_read_once_however_deep():
    params, generator = SAMPLERS["window 3"], torch.Generator().manual_seed(4)
    for depth in (0, 7, 8, 15, 16, 25):
        logits = random_logits(4 + 3 * depth, generator, ties=False)
        tree = grown_tree(params, [3], depth, logits, generator)
        sampler = Sampler(params, WORDS, CPU, [3])
        with HostReads() as counter:
            path, _ = take(drawn_whole, tree, logits, sampler)
        assert len(path) > depth
        assert counter.reads == 1


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a CUDA device, wherever it runs.

    Reads of values; operators whose output's shape depends on values; and indexing with masks or lists, which ends in
    one of these or in a copy that is waited for.
    """

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "equal", "repeat_interleave")
    METHODS = ("tolist", "numpy", "cpu", "__array__")

    def __enter__(self):
        self.reads = 0
        self._originals = {name: getattr(torch.Tensor, name) for name in self.METHODS}
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, self._counted(original))
        # Rows that stand for a device's are not copied by NumPy.
        self._on_host, host_rows.on_host = host_rows.on_host, lambda tensor: False
        return super().__enter__()

    def __exit__(self, *error):
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, original)
        host_rows.on_host = self._on_host
        return super().__exit__(*error)

    def _counted(self, original):
        def counted(tensor, *args, **kwargs):
            self.reads += 1
            return original(tensor, *args, **kwargs)

        return counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").split(".")[0].lstrip("_").removesuffix("_")
        self.reads += name in [waiting.lstrip("_") for waiting in self.WAITING] or name.startswith("unique")
        self.reads += name in ("index", "index_put", "index_put_impl")
        return function(*args, **(kwargs or {}))


def test_reads_are_counted():
    """The counter itself: one for each way to look at values, none for arithmetic."""
    numbers, mask = torch.tensor([3.0, 1.0]), torch.tensor([True, False])
    with HostReads() as counter:
        numbers[0].add_(1)
        numbers.index_select(0, torch.tensor([1])).sort()
    assert counter.reads == 0
    looks = (
        lambda: numbers.tolist(),
        lambda: numbers[0].item(),
        lambda: int(numbers[0]),
        lambda: float(numbers[0]),
        lambda: bool(mask[0]),
        lambda: 5 if mask[0] else 6,
        lambda: [7, 8, 9, 10][torch.tensor(1)],
        lambda: numbers.cpu(),
        lambda: numbers.numpy(),
        lambda: numbers[mask],
        lambda: numbers[[0, 1]],
        lambda: mask.nonzero(),
        lambda: numbers.masked_select(mask),
        lambda: numbers.unique(),
        lambda: torch.bincount(torch.tensor([1, 1])),
        lambda: torch.equal(numbers, numbers),
    )
    for place, look in enumerate(looks):
        with HostReads() as counter:
            look()
        assert counter.reads == 1, place


@pytest.mark.parametrize(
    "method, kind", [("medusa", "chained"), ("medusa", "independent"), ("medusa", "gated"), ("tokenswift", "chained"),
                     ("tokenswift", "conditioned"), ("tokenswift-fused", "gated"), ("tokenswift-fused", "conditioned")]
)  # fmt: skip
def test_a_proposal_of_heads_reads_once(model, prompt, monkeypatch, method, kind):
    propose, reads = Engine._draft, []

    def counted(*args):
        with HostReads() as counter:
            trees = propose(*args)
        reads.append(counter.reads)
        return trees

    monkeypatch.setattr(Engine, "_draft", counted)
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    options = TokenSwiftOptions(tree=(2, 2, 3), ngrams=3)
    out = dec.generate(prompt, 40, method, GENERATIONS["short window"], options)
    assert len(reads) == out.stats.steps
    # Without a draft pass the first step has nothing to propose from.
    assert reads == [int(method == "tokenswift")] + [1] * (len(reads) - 1)


@pytest.mark.parametrize("own_level", [False, True])
@pytest.mark.parametrize("window", [0, 1, 2, 1024])
def test_levels_drafted_on_the_device_are_those_read_one_by_one(model, own_level, window):
    """Conditioned heads against the obvious loop that reads each token; a level without candidates is the last."""
    dec = Decoder(model, heads=random_heads(model, 4, "conditioned"))
    heads, target = dec.heads["conditioned"], dec.target
    levels = HeadLevels(target, heads, coupled=True, width=3)
    params = SamplingParams(seed=3, min_p=0.05, repetition_penalty=3.0, penalty_window=window)
    generator, head = torch.Generator().manual_seed(5), target.head
    for empty in (None, 0, 2):
        sampler = Sampler(params, VOCAB, CPU, torch.randint(VOCAB, (3,), generator=generator).tolist())
        first = torch.randn(32, dtype=torch.float64, generator=generator)

        def logits(normalised, level, empty=empty):
            return head(normalised) if level != empty else torch.full((1, VOCAB), -torch.inf, dtype=torch.float64)

        expected, drafted, hidden = [], [], first
        with torch.inference_mode():
            for level, width in enumerate((2, 1, 3, 2)):
                if own_level and not level:
                    normalised = target.norm(hidden)
                else:
                    newest = [*sampler.context, *drafted][-1]
                    hidden, normalised = heads.advance(level - own_level, hidden, target.embed(newest))
                weak = not (own_level and not level)
                scores = logits(normalised[None], level)
                scores = sampler.draft_scores(scores, True, sampler.draft_context(drafted), weak=weak)[0]
                ranked = scores.sort(descending=True).indices[:width].tolist()
                expected.append([token for token in ranked if scores[token] > -torch.inf])
                if not expected[-1]:
                    break
                drafted.append(expected[-1][0])
            calls = iter(range(4))
            target.head = lambda normalised, rows=None, logits=logits, calls=calls: logits(normalised, next(calls))
            try:
                found = ranked_tokens(drafted_levels(levels, first[None], sampler, 4, own_level))
                # What stands behind a level without candidates is never reached.
                found = [row[:width] for row, width in zip(found, (2, 1, 3, 2), strict=True)][: len(expected)]
                assert found == expected
            finally:
                del target.head
        assert len(expected) == (4 if empty is None else empty + 1)


class OneDevice(TorchDispatchMode):
    """Refuses operators on tensors of several devices, or of the host alone."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.device.type == "meta" for tensor in tensors), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("params", SAMPLERS.values(), ids=SAMPLERS)
def test_a_walk_keeps_to_its_device(params, monkeypatch):
    """On tensors that hold no values, where a read is an error, and so is a tensor of the host among the others."""

    def upload(numbers, device):
        shape = (len(numbers), len(numbers[0])) if isinstance(numbers[0], list | tuple) else (len(numbers),)
        return torch.empty(shape, dtype=torch.long, device=device)

    for module in ("sampler", "draft_context", "penalty_window", "tree_draws"):
        monkeypatch.setattr(f"decoder.sampling.{module}.upload", upload)
    tree = TokenTree(3)
    tree.add_path([4, 5, 6, 7, 8], "draft")
    with OneDevice():
        sampler = Sampler(params, WORDS, torch.device("meta"), [1, 2, 3], **COLLECTED)
        logits = torch.empty(9, WORDS, dtype=torch.bfloat16, device="meta")
        draws = TreeDraws(tree, logits, sampler)
        numbers = draws.numbers
        assert (numbers.shape, numbers.dtype, numbers.device.type) == ((6 * (3 + 2 * 4),), torch.float64, "meta")
        assert (draws.last_node.shape, draws.draft_context.newest().shape) == ((1,), (1,))
        assert sampler.draft_scores(logits, True, draws.draft_context).shape == (9, WORDS)
        sampler.push(5)
        for drafted in ([], [1, 2, 3, 4]):
            assert sampler.draft_scores(logits, True, sampler.draft_context(drafted)).shape == (9, WORDS)
        drafted = upload([[1, 2], [1, 3]], torch.device("meta"))
        for ahead in (sampler.draft_context(), draws.draft_context):
            assert sampler.branch_scores(logits[:2], True, ahead, drafted).shape == (2, WORDS)


@contextmanager
def waiting_refused(monkeypatch, *modules):
    """On CUDA nothing in this block may wait for the device but the downloads of ``modules``, which are collected."""
    reads = []

    def read(tensor):
        torch.cuda.set_sync_debug_mode("default")
        reads.append(tensor.tolist())
        torch.cuda.set_sync_debug_mode("error")
        return reads[-1]

    for module in modules:
        monkeypatch.setattr(f"decoder.{module}.download", read)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield reads
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 10])
@pytest.mark.parametrize("params", SAMPLERS.values(), ids=SAMPLERS)
def test_on_cuda_the_walk_waits_for_its_one_read_only(params, depth, monkeypatch):
    """And it is the host's walk there too."""
    generator = torch.Generator().manual_seed(6)
    logits = random_logits(40, generator, ties=True)
    tree = grown_tree(params, [1, 2, 3, 1], depth, logits, generator) if depth else TokenTree(1)
    device, logits = torch.device("cuda"), logits.cuda()
    samplers = [Sampler(params, WORDS, device, [1, 2, 3, 1], **COLLECTED) for _ in range(2)]
    expected = take(exact, tree, logits, samplers[0])
    assert len(expected[0]) > depth
    with waiting_refused(monkeypatch):
        draws = TreeDraws(tree, logits, samplers[1])
    draws.read(draws.numbers.tolist())
    assert take(lambda *_: walk(tree, draws), tree, logits, samplers[1]) == expected
    assert state(samplers[1]) == state(samplers[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["chained", "gated"])
def test_on_cuda_a_proposal_waits_for_its_one_read_only(kind, monkeypatch):
    model = tiny_llama().cuda()
    dec = Decoder(model, heads=random_heads(model, kind=kind))
    levels = HeadLevels(dec.target, dec.heads[kind], coupled=True, width=3)
    sampler = Sampler(GENERATIONS["short window"], VOCAB, torch.device("cuda"), [1, 2, 3, 4])
    hidden = torch.randn(32, dtype=torch.float64).cuda()
    with torch.inference_mode():
        expected = drafted_levels(levels, hidden[None], sampler, 3)
        with waiting_refused(monkeypatch, "drafters.levels") as reads:
            assert drafted_levels(levels, hidden[None], sampler, 3) == expected
    assert len(reads) == 1
    assert len(expected) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ar", "medusa", "tokenswift-fused", "auto"])
def test_on_cuda_a_step_waits_for_its_one_read_only(prompt, method, monkeypatch):
    """Once its passes are recorded; a drafter that had stopped drafting asks for its first levels by themselves."""
    dec = Decoder(tiny_llama().cuda(), heads=random_heads(tiny_llama(), kind="gated"))
    step, counts = Engine.step, []

    def watched(engine):
        if not engine.running or engine.running[0].statistics.steps < 30:
            return step(engine)
        with pytest.MonkeyPatch.context() as patch:
            modules = ("engine", "sampling.sampler", "drafters.levels")
            with waiting_refused(patch, *modules) as reads:
                tokens = step(engine)
        counts.append(len(reads))
        return tokens

    monkeypatch.setattr(Engine, "step", watched)
    plain = dec.generate(prompt, 150, "ar", GENERATIONS["sampled"])
    counts.clear()
    assert dec.generate(prompt, 150, method, GENERATIONS["sampled"]).token_ids == plain.token_ids
    assert set(counts) <= {1, 2} and counts.count(1) >= (1 if method == "ar" else 0.8) * len(counts), counts


@pytest.mark.gpu
def test_on_cuda_generations_walk_on_the_device_unless_a_hook_wants_to_see(prompt, monkeypatch):
    dec = Decoder(tiny_llama().cuda(), heads=random_heads(tiny_llama()))
    walks = []
    monkeypatch.setattr("decoder.engine.TreeDraws", lambda *args: walks.append(1) or TreeDraws(*args))
    plain = dec.generate(prompt, 60, "ar", GENERATIONS["sampled"])
    walks.clear()
    assert dec.generate(prompt, 60, "medusa", GENERATIONS["sampled"]).token_ids == plain.token_ids
    assert walks
    walks.clear()
    hooked = dec.generate(prompt, 60, "medusa", GENERATIONS["sampled"], logits_hook=lambda context, logits: logits)
    assert hooked.token_ids == plain.token_ids
    assert not walks
