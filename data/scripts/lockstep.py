"""Writes rows of text in step with one another: every pass of the model gives each row its next token.

All rows stand at the same position, so that nothing is padded, a pass is a few large products, and the states of the
model, which draft heads learn from, are there when the text is: it need not be read again. Products of normed inputs
run in eight bits, a scale per row and per output, those of the MLPs' inner states, which have outliers, in bfloat16.
For models of the Llama and Qwen2 architectures. Eight bits and `write_texts` are for a CPU, `write_script` for a GPU.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from decoder import SamplingParams
from heads_train.loss import compiled

# Tokens less likely than this share of the most likely one are not drawn.
LEAST_LOG_SHARE = -12.0
MODEL_TYPES = ("llama", "qwen2")
# Turns of a row that have a prompt of their own in a `Script`; behind so many short ones the model goes on as it likes.
TURNS = 16


@cache
def largest_code() -> int:
    """The largest code of a weight whose products PyTorch adds up exactly: 127, or 63 on a processor without VNNI.

    Such a processor adds two products in 16 bits, and cuts what is larger. Inputs have codes up to 255.
    """
    products = _byte_products(
        torch.full((4, 64), 255, dtype=torch.uint8),
        _packed(torch.full((16, 64), 127, dtype=torch.int8)),
        torch.ones(16),
        0,
    )
    return 127 if (products == 64 * 255 * 127).all() else 63


def _packed(codes: Tensor) -> Tensor:
    return torch.ops.onednn.qlinear_prepack(codes, None)


def _byte_products(x: Tensor, packed: Tensor, scales: Tensor, middle: int) -> Tensor:
    """Sums of products of unsigned codes less their ``middle`` with signed ones, times a scale per output."""
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    return torch.ops.onednn.qlinear_pointwise(
        *(x, torch.tensor(1.0), torch.tensor(middle, dtype=torch.int32), packed, scales, zeros),
        *(None, 1.0, 0, torch.float32, "none", [], ""),
    )


class ByteProduct:
    """The product with a weight [n, k] in signed bytes: a scale for each output, and one for each row of inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.scales = weight.float().abs().amax(-1).clamp_min(1e-12) / largest_code()
        self.weight = _packed((weight.float() / self.scales[:, None]).round().to(torch.int8))
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        y = _byte_products((x / scale + 128).round().to(torch.uint8), self.weight, self.scales, 128).mul_(scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)


class Product:
    """The product with a weight [n, k] in its own dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def _joined(kind: type, *layers: nn.Linear):
    biases = [layer.bias for layer in layers]
    return kind(torch.cat([layer.weight for layer in layers]), None if biases[0] is None else torch.cat(biases))


class Lockstep:
    """A model with the caches of ``rows`` texts of up to ``tokens`` tokens, all at the same position."""

    def __init__(self, model, rows: int, tokens: int, short: bool = True):
        config = model.config
        if config.model_type not in MODEL_TYPES:
            raise ValueError(
                f"rows are written in step by models of type {' and '.join(MODEL_TYPES)} alone, and this one is "
                f"{config.model_type}: let generate_own_text.py write them without --states"
            )
        self.layers, self.embeddings = model.model.layers, model.get_input_embeddings()
        self.eps, self.norm = config.rms_norm_eps, model.model.norm.weight
        self.kv, self.size = config.num_key_value_heads, self.layers[0].self_attn.head_dim
        self.groups = config.num_attention_heads // self.kv
        normed = ByteProduct if short else Product
        self.products = [
            (
                _joined(normed, each.self_attn.q_proj, each.self_attn.k_proj, each.self_attn.v_proj),
                _joined(normed, each.self_attn.o_proj),
                _joined(normed, each.mlp.gate_proj, each.mlp.up_proj),
                _joined(Product, each.mlp.down_proj),
            )
            for each in self.layers
        ]
        self.head = _joined(normed, model.get_output_embeddings())
        positions = torch.arange(tokens, device=self.norm.device)[None]
        self.cos, self.sin = (x[0] for x in model.model.rotary_emb(self.norm, positions))
        self.keys, self.values = (
            self.norm.new_zeros(len(self.layers), rows, self.kv, tokens, self.size) for _ in range(2)
        )
        self.position = 0

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Read the next token ``ids`` [rows] of every row; their states [rows, d] before the model's final norm."""
        x, at = self.embeddings(ids), self.position
        for number, layer in enumerate(self.layers):
            qkv, out, gate_up, down = self.products[number]
            heads = qkv(self._normed(x, layer.input_layernorm.weight)).unflatten(-1, (-1, self.size))
            q, k, v = heads.split((self.groups * self.kv, self.kv, self.kv), dim=1)
            self.keys[number, :, :, at], self.values[number, :, :, at] = self._turned(k), v
            q = self._turned(q).unflatten(1, (self.kv, self.groups))
            # A group's queries share keys, and all of them see the whole text so far.
            seen = functional.scaled_dot_product_attention(
                q, self.keys[number, :, :, : at + 1], self.values[number, :, :, : at + 1]
            )
            x = x + out(seen.flatten(1))
            gate, up = gate_up(self._normed(x, layer.post_attention_layernorm.weight)).chunk(2, dim=-1)
            x = x + down(functional.silu(gate) * up)
        self.position += 1
        return x

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Logits [n, vocabulary] of states [n, d]."""
        return self.head(self._normed(states, self.norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _turned(self, x: Tensor) -> Tensor:
        half = self.size // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos[self.position] + turned * self.sin[self.position]


class Text:
    """One text in the making: what is given of it is read, then the model writes to the end of its turn.

    ``prompts`` yields what is given, token ids, and how the text behind it is sampled; ``ends`` are the tokens that end
    a turn.
    """

    def __init__(self, prompts: Iterator[tuple[list[int], SamplingParams]], ends: Collection[int]):
        self.prompts, self.ends, self.ids = prompts, ends, []
        prompt, self.sampling = next(prompts)
        self.given = deque(prompt)

    def add(self, token: int) -> None:
        """Append a token that the model wrote."""
        self.ids.append(token)
        if token in self.ends:
            prompt, self.sampling = next(self.prompts)
            self.given.extend(prompt)


def write_texts(model: Lockstep, texts: list[Text], tokens: int, seed: int, progress) -> tuple[Tensor, Tensor]:
    """Write all ``texts`` to ``tokens`` tokens: ids [rows, tokens], int64, and states [rows, tokens, d].

    ``progress`` is called with the number of tokens after each pass.
    """
    rng, states = torch.Generator().manual_seed(seed), []
    model.position = 0
    for position in range(tokens):
        writing = [row for row, text in enumerate(texts) if not text.given]
        if writing:
            logits = model.logits(states[-1][writing])
            own = [texts[row] for row in writing]
            drawn = draw(logits, [text.sampling for text in own], [text.ids for text in own], rng)
            for text, token in zip(own, drawn, strict=True):
                text.add(token)
        for text in texts:
            if len(text.ids) == position:
                text.ids.append(text.given.popleft())
        states.append(model.step(torch.tensor([text.ids[position] for text in texts])))
        progress(len(texts))
    return torch.tensor([text.ids for text in texts]), torch.stack(states, dim=1)


def draw(
    logits: Tensor, samplings: Sequence[SamplingParams], texts: Sequence[list[int]], rng: torch.Generator
) -> list[int]:
    """A token for each row of ``logits`` [n, vocabulary], which are changed, by its settings."""
    for row, sampling in enumerate(samplings):
        if sampling.repetition_penalty != 1:
            ids = torch.tensor(texts[row])
            found = logits[row, ids]
            penalty = sampling.repetition_penalty
            logits[row, ids] = torch.where(found > 0, found / penalty, found * penalty)
    best, best_ids = logits.max(-1)
    bounds = []
    for sampling in samplings:
        least = (
            LEAST_LOG_SHARE if not sampling.min_p else max(LEAST_LOG_SHARE, float(torch.tensor(sampling.min_p).log()))
        )
        bounds.append(least * (sampling.temperature or 1.0))
    near = logits >= (best.float() + torch.tensor(bounds)).to(logits.dtype)[:, None]
    rows, ids = near.nonzero(as_tuple=True)
    heats = torch.tensor([sampling.temperature or 1.0 for sampling in samplings])
    shares = ((logits[rows, ids].float() - best[rows].float()) / heats[rows]).exp()
    ends = torch.bincount(rows, minlength=len(logits)).cumsum(0).tolist()
    tokens, begin = [], 0
    for row, (sampling, end) in enumerate(zip(samplings, ends, strict=True)):
        if sampling.temperature:
            tokens.append(int(ids[begin + int(torch.multinomial(shares[begin:end], 1, generator=rng))]))
        else:
            tokens.append(int(best_ids[row]))
        begin = end
    return tokens


class Script:
    """What is given of rows of ``tokens`` tokens, on a device, so that nothing else is asked while they are written.

    ``given`` [rows, tokens] are the tokens of a row's prompts (`Text`), one behind another. The prompt of turn n ends
    before the token ``ends`` [rows, turns], and what the model writes behind it is sampled by ``settings``
    [rows, turns, 3]: temperature, the least logarithm of a token's share of the likeliest one's probability, penalty.
    """

    def __init__(self, rows: Sequence[Iterator[tuple[list[int], SamplingParams]]], tokens: int, device: torch.device):
        given, ends = np.zeros((len(rows), tokens), np.int64), np.full((len(rows), TURNS), tokens)
        settings = np.ones((len(rows), TURNS, 3), np.float32)
        for number, prompts in enumerate(rows):
            end = turn = 0
            while end < tokens and turn < TURNS:
                prompt, sampling = next(prompts)
                prompt = prompt[: tokens - end]
                given[number, end : end + len(prompt)] = prompt
                end += len(prompt)
                ends[number, turn], settings[number, turn:] = end, _settings(sampling)
                turn += 1
            ends[number, turn:] = end
        self.given, self.ends, self.settings = (torch.from_numpy(x).to(device) for x in (given, ends, settings))


def _settings(sampling: SamplingParams) -> tuple[float, float, float]:
    least = float(np.log(sampling.min_p)) if sampling.min_p else LEAST_LOG_SHARE
    return sampling.temperature, max(LEAST_LOG_SHARE, least), sampling.repetition_penalty


@torch.no_grad()
def write_script(model: Lockstep, script: Script, ends: Collection[int], seed: int) -> tuple[Tensor, Tensor]:
    """Write all rows of a script: ids [rows, tokens] and states [rows, tokens, d] before the model's final norm.

    Behind each token of ``ends`` that the model writes the next prompt follows.
    """
    device, (count, tokens) = script.given.device, script.given.shape
    rng, rows = torch.Generator(device).manual_seed(seed), torch.arange(count, device=device)
    ids, last = torch.zeros_like(script.given), torch.tensor(list(ends), device=device)
    states = model.norm.new_empty(count, tokens, len(model.norm))
    seen = torch.zeros(count, len(model.embeddings.weight), dtype=torch.bool, device=device)
    turn, read = torch.zeros_like(rows), torch.ones_like(rows)
    token = script.given[:, 0]
    for position in tqdm(range(tokens), "writing", unit=" tokens a row", leave=False, disable=None):
        ids[:, position], seen[rows, token] = token, True
        states[:, position] = state = model.step(token)
        drawn = draw_on_device(model.logits(state), script.settings[rows, turn], seen, rng)
        given = read < script.ends[rows, turn]
        token = torch.where(given, script.given[rows, read.clamp_max(tokens - 1)], drawn)
        read += given
        turn = (turn + (~given & torch.isin(token, last))).clamp_max(TURNS - 1)
    return ids, states


def draw_on_device(logits: Tensor, settings: Tensor, seen: Tensor, rng: torch.Generator) -> Tensor:
    """A token for each row [n] of ``logits`` [n, vocabulary], by its settings (`Script`).

    The penalty is for the tokens that ``seen`` [n, vocabulary] tells.
    """
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=rng)
    choose = _in_one_kernel if logits.is_cuda else chosen
    return choose(logits, settings, seen, noise)


def chosen(logits: Tensor, settings: Tensor, seen: Tensor, noise: Tensor) -> Tensor:
    """The tokens that exponential ``noise`` [n, vocabulary] makes of what `draw_on_device` is given."""
    temperature, least, penalty = settings[:, None].unbind(-1)
    logits = logits.float()
    logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    best, likeliest = logits.max(-1)
    shares = (logits - best[:, None]) / temperature.clamp_min(1e-3)
    # The largest of logits with Gumbel noise has their distribution, and needs no sum over them.
    drawn = torch.where(shares < least, -torch.inf, shares - noise.clamp_min(1e-30).log()).argmax(-1)
    return torch.where(temperature[:, 0] > 0, drawn, likeliest)


# A GPU reads and writes the logits some twenty times else, a third of the time of writing.
_in_one_kernel = compiled(chosen)
