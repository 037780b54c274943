"""The hash against plain Python integers, and the draws against their distributions."""

import torch
from scipy import stats

from spatially import randomness

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def test_element_bits_are_splitmix_in_plain_integers() -> None:
    key, index = randomness.stream(3, "shuffle", 8), [0, 1, 17, 2**40, 2**62]
    bits = randomness.element_bits(key, torch.tensor(index), 5)
    expected = [[mix((mix((key + GAMMA * (i + 1)) & MASK) + GAMMA * (e + 1)) & MASK) for e in range(5)] for i in index]
    assert [[int(value) & MASK for value in row] for row in bits] == expected


def test_stream_separates_seed_and_purpose() -> None:
    keys = {randomness.stream(seed, kind, block) for seed in range(4) for kind in ("a", "b") for block in (1, 11)}
    assert len(keys) == 16
    assert randomness.stream(0, "shuffle", 8) == randomness.stream(0, "shuffle", 8)


def test_draws_do_not_depend_on_the_batch() -> None:
    index = torch.arange(64)
    together = randomness.normal(5, index, (3, 9, 7))
    alone = torch.cat([randomness.normal(5, index[i : i + 1], (3, 9, 7)) for i in range(64)])
    assert torch.equal(together, alone)


def test_normal_is_standard_normal() -> None:
    noise = randomness.normal(randomness.stream(0, "test"), torch.arange(8), (5, 64, 64)).double()
    assert abs(noise.mean()) < 5 / noise.numel() ** 0.5
    assert abs(noise.std() - 1) < 5 / (2 * noise.numel()) ** 0.5
    assert stats.kstest(noise.flatten()[::7].numpy(), "norm").pvalue > 1e-3
    channels = noise.transpose(0, 1).flatten(1)
    correlation = torch.corrcoef(channels) - torch.eye(5, dtype=torch.float64)
    assert correlation.abs().max() < 5 / channels.shape[1] ** 0.5


def test_below_is_uniform() -> None:
    numbers = randomness.below(randomness.element_bits(9, torch.arange(100), 700), 7)
    assert numbers.min() == 0
    assert numbers.max() == 6
    assert stats.chisquare(numbers.flatten().bincount(minlength=7).numpy()).pvalue > 1e-3
