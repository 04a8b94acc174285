"""Which tokens a step sees: every token once an epoch, whatever the number of processes, from any step on."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from base.cli import UserError
from data.batches import EvalWindows, TrainBatches, permute
from data.files import Shard, Tokens

UINT16 = np.dtype("<u2")


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """tokens(n): n tokens, each of which is its own position."""
    path = tmp_path_factory.mktemp("counting") / "tokens.bin"
    np.arange(2**16, dtype=UINT16).tofile(path)
    return lambda n: Tokens([Shard(path, UINT16, n)])


def sharded(folder: Path, sizes: list[int]) -> Tokens:
    """Counting tokens spread over files of these sizes."""
    shards, first = [], 0
    for i, size in enumerate(sizes):
        np.arange(first, first + size, dtype=UINT16).tofile(folder / f"{i}.bin")
        shards.append(Shard(folder / f"{i}.bin", UINT16, size))
        first += size
    return Tokens(shards)


def windows(batches: TrainBatches, first: int, count: int) -> np.ndarray:
    """`count` of the run's windows from window `first` on, read one row at a time: [count, block_size]."""
    rows = [divmod(i, batches.batch_size) for i in range(first, first + count)]
    return np.concatenate([batches.batch(step, range(row, row + 1))[0] for step, row in rows])


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_one_to_one(size, key):
    image = permute(np.arange(size, dtype=np.uint64), size, np.full(size, key, np.uint64))
    assert sorted(image.tolist()) == list(range(size))


def test_permute_needs_no_memory_for_many_windows():
    size = 10**12
    index = np.arange(size - 1000, size, dtype=np.uint64)
    image = permute(index, size, np.full(1000, 5, np.uint64))
    assert len(set(image.tolist())) == 1000
    assert image.max() < size
    assert image.astype(float).mean() / size == pytest.approx(0.5, abs=0.05)


def test_permute_sends_every_index_everywhere_equally_often():
    keys = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    for index in (0, 6):
        images = permute(np.full(len(keys), index, np.uint64), 7, keys)
        counts = np.bincount(images.astype(int), minlength=7)
        chi_square = ((counts - len(keys) / 7) ** 2 / (len(keys) / 7)).sum()
        assert chi_square < 22.5  # exceeded by chance once in a thousand at 6 degrees of freedom


def test_neighbours_do_not_stay_neighbours():
    size = 10_000
    image = permute(np.arange(size, dtype=np.uint64), size, np.full(size, 9, np.uint64)).astype(int)
    assert (np.abs(np.diff(image)) == 1).sum() < 12  # 2 are expected of a random order
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05


@settings(max_examples=60)
@given(st.data())
def test_every_token_is_input_and_target_once_an_epoch(counting, data):
    n = data.draw(st.integers(2, 700), "tokens")
    block_size = data.draw(st.integers(1, n - 1), "block_size")
    batch_size = data.draw(st.integers(1, 9), "batch_size")
    epoch = data.draw(st.integers(0, 5), "epoch")
    batches = TrainBatches(
        counting(n), block_size=block_size, batch_size=batch_size, seed=data.draw(st.integers())
    )
    count = n // block_size
    positions = range(epoch * count, (epoch + 1) * count)
    pairs = [batches.batch(i // batch_size, range(i % batch_size, i % batch_size + 1)) for i in positions]
    x = torch.cat([x for x, _ in pairs])
    y = torch.cat([y for _, y in pairs])
    assert torch.equal(y, (x + 1) % n)
    for tokens in (x, y):
        seen = torch.bincount(tokens.flatten(), minlength=n)
        assert seen.max() == 1
        assert seen.sum() == n - n % block_size


def test_epochs_and_seeds_differ_in_order_and_offset(counting):
    tokens = counting(1000)
    starts = {}
    for seed in (1, 2):
        batches = TrainBatches(tokens, block_size=10, batch_size=100, seed=seed)
        for epoch in (0, 1):
            starts[seed, epoch] = batches.starts(epoch, range(100))
    offsets = {key: int(value[0]) % 10 for key, value in starts.items()}
    orders = {tuple(value // 10) for value in starts.values()}
    assert len(orders) == 4
    assert len(set(offsets.values())) > 1


def test_seeded_starts_stay_what_they_were(counting):
    # A resumed run computes its order anew: should these change, resumption is exact no longer.
    batches = TrainBatches(counting(1000), block_size=10, batch_size=4, seed=1337)
    assert batches.starts(0, range(4)).tolist() == [978, 888, 228, 478]
    assert batches.starts(10**9, range(4)).tolist() == [147, 417, 517, 297]


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (1, 4), (2, 3), (4, 1), (12, 1)])
def test_rows_do_not_depend_on_how_the_batch_is_shared(counting, processes, accumulation):
    tokens = counting(5000)
    whole_x, whole_y = TrainBatches(tokens, block_size=8, batch_size=12, seed=3).batch(70, range(12))
    size = 12 // (processes * accumulation)
    parts = []
    for rank in range(processes):
        own = TrainBatches(tokens, block_size=8, batch_size=12, seed=3)  # each process has its own
        for micro in range(accumulation):
            first = (rank * accumulation + micro) * size
            parts.append(own.batch(70, range(first, first + size)))
    assert torch.equal(torch.cat([x for x, _ in parts]), whole_x)
    assert torch.equal(torch.cat([y for _, y in parts]), whole_y)


def test_a_step_does_not_depend_on_the_steps_before(counting):
    ahead = TrainBatches(counting(3000), block_size=16, batch_size=5, seed=0)
    for step in range(400):
        last = ahead.batch(step, range(5))
    resumed = TrainBatches(counting(3000), block_size=16, batch_size=5, seed=0).batch(399, range(5))
    assert torch.equal(last[0], resumed[0])
    assert torch.equal(last[1], resumed[1])


def test_batches_run_over_the_end_of_an_epoch(counting):
    # 31 windows an epoch: neither 3 nor 7 divides that, so both sizes straddle, at different places.
    by_three, by_seven = (
        windows(TrainBatches(counting(500), block_size=16, batch_size=size, seed=4), 0, 105)
        for size in (3, 7)
    )
    assert np.array_equal(by_three, by_seven)


def test_windows_run_over_the_ends_of_shards(tmp_path):
    sizes = [5, 1, 0, 7, 40, 2]
    tokens = sharded(tmp_path, sizes)
    ring = np.arange(sum(sizes))
    starts = ring.repeat(1)
    assert len(tokens) == len(ring)
    expected = (starts[:, None] + np.arange(12)) % len(ring)
    assert np.array_equal(tokens.read(starts, 12), expected)


def test_batches_are_the_same_whatever_the_shards(tmp_path, counting):
    options = {"block_size": 9, "batch_size": 11, "seed": 8}
    one = TrainBatches(counting(200), **options).batch(2, range(11))
    many = TrainBatches(sharded(tmp_path, [50, 3, 97, 50]), **options).batch(2, range(11))
    assert torch.equal(one[0], many[0])
    assert torch.equal(one[1], many[1])


def test_batches_are_int64_and_leave_random_states_alone(counting):
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    x, y = TrainBatches(counting(300), block_size=7, batch_size=2, seed=0).batch(0, range(2))
    assert (x.dtype, y.dtype, x.device.type) == (torch.int64, torch.int64, "cpu")
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_a_context_as_long_as_the_data_is_refused(counting):
    with pytest.raises(
        UserError, match=r"context of 64 tokens is longer than the training data.*--block-size 63"
    ):
        TrainBatches(counting(64), block_size=64, batch_size=1, seed=0)
    TrainBatches(counting(65), block_size=64, batch_size=1, seed=0)


@settings(max_examples=100)
@example(n=101, block_size=64, max_tokens=100)
@given(n=st.integers(2, 400), block_size=st.integers(1, 50), max_tokens=st.integers(1, 500))
def test_evaluation_windows(counting, n, block_size, max_tokens):
    chosen = EvalWindows(counting(n), block_size=block_size, max_tokens=max_tokens)
    x, y = chosen.batch(range(len(chosen)))
    scored = y[y >= 0]
    assert torch.equal(x[y >= 0] + 1, scored)
    assert len(scored.unique()) == len(scored)
    if max_tokens >= n - 1:
        assert scored.sort().values.tolist() == list(range(1, n))
    else:
        assert len(scored) <= max(max_tokens, block_size)
        assert (y >= 0).all() or len(chosen) == 1
        # as many as max_tokens allows for, and evenly spread: gaps differ by one window at most
        assert len(chosen) == min(max(1, max_tokens // block_size), -(-(n - 1) // block_size))
        gaps = np.diff(chosen.starts) // block_size
        assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


def test_evaluation_windows_reach_over_all_of_the_data(counting):
    chosen = EvalWindows(counting(1001), block_size=10, max_tokens=59)
    assert chosen.starts.tolist() == [0, 200, 400, 600, 800]


def test_evaluation_pads_the_last_window_only(counting):
    chosen = EvalWindows(counting(11), block_size=4, max_tokens=100)
    x, y = chosen.batch(range(1, 3))
    assert x.tolist() == [[4, 5, 6, 7], [8, 9, 0, 0]]
    assert y.tolist() == [[5, 6, 7, 8], [9, 10, -1, -1]]


def test_evaluation_needs_a_target(counting):
    with pytest.raises(UserError, match="at least 2"):
        EvalWindows(counting(1), block_size=4, max_tokens=100)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads its memory from /proc")
def test_resident_memory_does_not_grow_with_what_was_read(tmp_path):
    size = 500 * 2**20
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(size)  # sparse: takes no disk space, but as many pages when read
    tokens = Tokens([Shard(tmp_path / "large.bin", UINT16, size // 2)])
    batches = TrainBatches(tokens, block_size=1024, batch_size=100, seed=0)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf(
            "SC_PAGESIZE"
        )

    for step in range(100):
        batches.batch(step, range(100))
    before = resident()
    for step in range(100, 100 + batches.windows_per_epoch // 100):
        batches.batch(step, range(100))
    assert resident() - before < size / 10
