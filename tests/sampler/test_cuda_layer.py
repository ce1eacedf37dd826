"""The kernels of a decode step give what float64 gives. On a GPU; on a CPU with Triton and TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .tiny import WIDE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device, and no Triton that is interpreted"
)
EPS = 1e-6
SHORT = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the largest number


@dataclass(frozen=True)
class Sizes:
    rows: int
    hidden: int
    inner: int  # of the MLP
    heads: tuple[int, int, int]  # queries, keys, size
    biases: bool = False
    head_norms: bool = False
    dtype: torch.dtype = torch.float32


SIZES = {
    "few_rows": Sizes(5, 96, 192, (4, 2, 32), biases=True),
    "no_multiples": Sizes(40, 80, 100, (3, 1, 16), biases=True, head_norms=True),
    "rows_in_two_tiles": Sizes(37, 128, 256, (2, 1, 64), head_norms=True),
    "large_heads": Sizes(20, 256, 512, (4, 2, 128), head_norms=True),
    "short_numbers": Sizes(20, 128, 512, (2, 1, 64), biases=True, dtype=SHORT),
    "many_rows": Sizes(520, 64, 96, (2, 1, 32), biases=True),
    "many_parts_of_a_row": Sizes(3, 2112, 64, (2, 1, 16)),
    "short_large": Sizes(3, 256, 768, (4, 2, 128), head_norms=True, dtype=SHORT),
}


def random(*shape: int, dtype: torch.dtype = torch.float32, around: float = 0.0) -> Tensor:
    return (0.1 * torch.randn(*shape, device=DEVICE) + around).to(dtype)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("name", list(SIZES))
def test_a_layer(name: str) -> None:
    from posttrain.sampler import cuda_layer as kernels

    torch.manual_seed(0)
    size = SIZES[name]
    (queries, keys, dim), rows, hidden = size.heads, size.rows, size.hidden

    def product(columns: int, depth: int, *, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = random(columns, depth, dtype=size.dtype)
        return weight, random(columns, dtype=size.dtype) if bias else None

    def times(x: Tensor, product: tuple[Tensor, Tensor | None]) -> Tensor:
        weight, bias = product
        return F.linear(x, weight.double(), None if bias is None else bias.double())

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight.double(), EPS)

    table, ids = random(50, hidden, dtype=size.dtype), torch.randint(0, 50, (rows,), device=DEVICE)
    norms = [random(hidden, dtype=size.dtype, around=1.0) for _ in range(3)]
    qkv = product((queries + 2 * keys) * dim, hidden, bias=size.biases)
    out, gated = product(hidden, queries * dim, bias=False), product(2 * size.inner, hidden, bias=False)
    down = product(hidden, size.inner, bias=size.biases)
    head_norms = tuple(random(dim, dtype=size.dtype, around=1.0) for _ in range(2)) if size.head_norms else None
    positions, frequencies = torch.arange(rows, device=DEVICE) * 17, torch.rand(dim // 2, device=DEVICE)
    angles = (positions[:, None].float() * frequencies).double()
    turn = [1.5 * torch.cat([angles.cos()] * 2, dim=1), 1.5 * torch.cat([-angles.sin(), angles.sin()], dim=1)]
    mixed = random(rows, queries * dim, dtype=size.dtype)

    x = table[ids].double()
    heads = times(normed(x, norms[0]), qkv).view(rows, -1, dim)
    parts = list(heads.split([queries, keys, keys], dim=1))
    for i in range(2):
        part = parts[i] if head_norms is None else normed(parts[i], head_norms[i])
        parts[i] = part * turn[0][:, None] + part.roll(dim // 2, -1) * turn[1][:, None]
    after_attention = x + times(mixed.double(), out)
    gate, up = times(normed(after_attention, norms[1]), gated).chunk(2, dim=-1)
    last = after_attention + times(F.silu(gate) * up, down)

    for _ in range(2):  # the second time finds counters as the first one left them
        stream, turned = kernels.embed(ids, positions, table, norms[0], (frequencies, 1.5))
        for one, other in zip(turned, turn, strict=True):
            assert_close(one, other, size.dtype)
        found = kernels.project(stream, qkv, turned, head_norms, (dim, keys), EPS)
        stream = kernels.add(stream, mixed, out, norms[1], kernels.OUT)
        hidden_in = kernels.gate(stream, gated, EPS)
        stream = kernels.add(stream, hidden_in, down, norms[2], kernels.DOWN)
        for one, other in zip(found, parts, strict=True):
            assert_close(one, other, size.dtype)
        assert_close(stream.x, last, size.dtype)
        assert_close(stream.scaled, last * norms[2].double(), size.dtype)
        assert_close(stream.squares.sum(0), last.square().sum(-1), size.dtype)


@dataclass(frozen=True)
class Scene:
    heads: tuple[int, int, int]  # queries, keys, size
    lengths: tuple[int, ...]  # tokens before the new one, of each sequence
    families: tuple[tuple[int, int], ...] = ()  # (first, last) columns that share the shortest one's tokens
    teamless: tuple[int, ...] = ()  # families whose members read for themselves
    window: int | None = None
    splits: int = 1
    dtype: torch.dtype = torch.float32


SCENES = {
    "alone": Scene((2, 1, 16), (150,)),
    "a_team_and_others": Scene((14, 2, 16), (130, 190, 140, 60, 1, 70), ((0, 3),)),
    "two_teams_of_a_family": Scene((6, 1, 16), tuple(range(100, 111)), ((0, 11),)),
    "nobody_in_teams": Scene((4, 2, 32), (99, 120, 64, 65), ((0, 2), (2, 4)), teamless=(0, 1)),
    "window_and_team": Scene((4, 4, 16), (130, 190, 140, 60), ((0, 3),), window=50),
    "parts_of_a_long_past": Scene((8, 2, 16), (700, 1, 300), ((0, 1),), splits=4),
    "parts_and_a_team": Scene((8, 2, 16), (700, 350, 300), ((0, 3),), splits=3),
    "one_key_head": Scene((32, 1, 16), (40, 90), ((0, 2),)),
    "short_numbers": Scene((14, 2, 64), (130, 190, 140, 60), ((0, 3),), dtype=SHORT),
    "large_heads": Scene((4, 2, 128), (130, 190, 140, 60), ((0, 3),), dtype=SHORT),
}


@pytest.mark.parametrize("name", list(SCENES))
def test_attention(name: str) -> None:
    from posttrain.sampler.cuda_attention import decode_attention, team_size
    from posttrain.sampler.cuda_launch import counters
    from posttrain.sampler.decode_ahead import teams_of

    torch.manual_seed(0)
    scene = SCENES[name]
    (heads, key_heads, dim), count = scene.heads, len(scene.lengths)
    capacity = max(scene.lengths) + 3
    layer = tuple(random(count + 1, key_heads, capacity, dim, dtype=scene.dtype) * 10 for _ in range(2))
    query, key, value = (random(h, count, dim, dtype=scene.dtype) * 10 for h in (heads, key_heads, key_heads))
    rows = [count - column for column in range(count)]
    families, in_teams = [(row, 0) for row in rows], [(row, 0) for row in rows]
    for number, (first, last) in enumerate(scene.families):
        family = [(rows[first], min(scene.lengths[first:last]))] * (last - first)
        families[first:last] = family
        if number not in scene.teamless:
            in_teams[first:last] = family
    members = team_size(heads, key_heads)
    teams = teams_of(in_teams, members, most=4)
    together = [shared if any(c in team for team in teams) else 0 for c, (_, shared) in enumerate(in_teams)]
    columns = [rows, [f[0] for f in families], [f[1] for f in families], together, scene.lengths]
    table = [[*in_teams[team[0]], *team, *[-1] * (members - len(team))] for team in teams] + [[0, 0, *[-1] * members]]

    expected, cached = [], tuple(part.clone() for part in layer)
    for b, ((leader, shared), row, length) in enumerate(zip(families, rows, scene.lengths, strict=True)):
        low = 0 if scene.window is None else max(0, length + 1 - scene.window)
        for part, new in zip(cached, (key, value), strict=True):
            part[row, :, length] = new[:, b]
        k, v = (
            torch.cat([part[leader, :, :shared], part[row, :, shared : length + 1]], dim=1)[:, low:].double()
            for part in cached
        )
        k, v = k.repeat_interleave(heads // key_heads, 0), v.repeat_interleave(heads // key_heads, 0)
        weights = (0.25 * (k @ query[:, b, :, None].double())).softmax(1)
        expected.append((weights.transpose(1, 2) @ v)[:, 0])

    for _ in range(2):  # the second time finds counters as the first one left them
        found = decode_attention(
            query,
            (key, value),
            layer,
            torch.tensor(columns, device=DEVICE),
            torch.tensor(table, device=DEVICE),
            scaling=0.25,
            window=scene.window,
            splits=scene.splits,
        )
        assert_close(found, torch.stack(expected), scene.dtype)
        assert all(torch.equal(one, other) for one, other in zip(layer, cached, strict=True))
        assert not counters(query.device, 1).any()


@pytest.mark.skipif(INTERPRETED, reason="NumPy's products of a row differ by where it stands among others")
def test_columns_that_repeat_compute_the_same() -> None:
    """Padding of a batch: both write the same place of the cache, so not one bit may differ, in a team or without."""
    from posttrain.sampler.cuda_attention import decode_attention, team_size

    torch.manual_seed(0)
    members, length = team_size(4, 2), 150
    layer = tuple(random(2, 2, 200, 32) for _ in range(2))
    query, key, value = (random(h, 1, 32).repeat(1, 11, 1) for h in (4, 2, 2))
    for together in (0, 70):
        columns = [[1] * 11, [0] * 11, [70] * 11, [together] * 11, [length] * 11]
        teams = [[0, 0, *[-1] * members]] * 2
        if together:
            teams = [[0, 70, *range(8)], [0, 70, 8, 9, 10, *[-1] * (members - 3)]]
        places, table = torch.tensor(columns, device=DEVICE), torch.tensor(teams, device=DEVICE)
        found = decode_attention(query, (key, value), layer, places, table, scaling=0.25, window=None, splits=2)
        assert found.isfinite().all()
        assert all(torch.equal(column, found[0]) for column in found)


@pytest.mark.parametrize(("kind", "alike"), [("default", True), ("linear", True), ("dynamic", False)])
def test_positions_whose_frequencies_move_are_left_to_the_modules(kind: str, alike: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from posttrain.sampler.joined_decoder import _turns_alike

    rope = {"rope_type": kind, "rope_theta": 10_000.0} | ({} if kind == "default" else {"factor": 4.0})
    config = LlamaConfig(**WIDE, rope_parameters=rope)
    decoder = LlamaForCausalLM(config).model.to(DEVICE)
    assert _turns_alike(decoder) == alike


def test_a_loop_has_as_many_stages_as_there_is_memory_for() -> None:
    from posttrain.sampler.cuda_launch import stages

    assert stages(3, 64 * 256 * 2, 227 << 10) == 3
    assert stages(3, 64 * 256 * 4, 163 << 10) == 2
    assert stages(3, 64 * 256 * 4, 99 << 10) == 1
    assert stages(3, 64 * 512 * 4, 99 << 10) == 1  # which the compiler has to make do with


@pytest.mark.skipif(not INTERPRETED, reason="test_cuda.py has the steps of a GPU")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_whole_steps_draw_what_step_by_step_draws(name: str) -> None:
    """Embedding to draw, teams and ranks that close included, in the engine that launches them ahead on a GPU."""
    from posttrain.sampler.cuda_attention import team_size
    from posttrain.sampler.cuda_graphs import decode_step
    from posttrain.sampler.decode_ahead import Columns, DecodeAhead
    from posttrain.sampler.joined_decoder import JoinedDecoder, joined_decoder
    from posttrain.sampler.native import NativeSampler

    from .test_decode_ahead import Done, several
    from .tiny import WIDE_CONFIGS, shaken

    class ByKernels(JoinedDecoder):
        def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
            return self._by_kernels(token_ids, positions, attention)[None]

    class Steps:
        def launch(self, size: int) -> Done:
            out = torch.zeros(2, size, dtype=torch.float64)
            teams.append(int((columns.teams[:, 1] > 0).sum()))
            decode_step(model, decoder, engine.cache, columns, out)
            return Done(out.tolist())

        def forget(self) -> None:
            return None

    model, teams = shaken(WIDE_CONFIGS[name]()), []
    joined = joined_decoder(model)
    assert (joined is None) == (name == "gemma3")
    decoder = model if joined is None else ByKernels(model.decoder, joined._how)
    sampler = NativeSampler(model)
    (engine,) = sampler.engines
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    columns = Columns.of(engine.limits.max_batch, engine.cache.device, members=team_size(*heads))
    engine._ahead = DecodeAhead(engine.cache, columns, Steps())
    ahead, plain = several(sampler, 7), several(NativeSampler(model), 7)
    assert [s.ids for s in ahead] == [s.ids for s in plain]
    for a, b in zip(ahead, plain, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert max(teams) > 0
