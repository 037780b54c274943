"""Properties of shuffling and masking, against what the definition says and against plain NumPy."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from spatially.errors import UserError
from spatially.perturb import draw_blocks, mask_blocks, shuffle_blocks
from spatially.perturb.blocks import channel_statistics

PERTURBATIONS = {"shuffle": shuffle_blocks, "mask": mask_blocks}


def numbered(batch: int, height: int, width: int) -> torch.Tensor:
    """Images whose every pixel is different."""
    count = batch * 3 * height * width
    return (torch.arange(count, dtype=torch.float64) / count).view(batch, 3, height, width)


def block_of_pixel(height: int, width: int, block: int) -> np.ndarray:
    """The block number of each pixel, −1 in the remainder."""
    rows, columns = np.arange(height) // block, np.arange(width) // block
    whole = (rows < height // block)[:, None] & (columns < width // block)
    return np.where(whole, rows[:, None] * (width // block) + columns, -1)


cases = st.fixed_dictionaries(
    {
        "height": st.integers(3, 40),
        "width": st.integers(3, 40),
        "block": st.integers(1, 12),
        "ratio": st.floats(0, 1),
        "seed": st.integers(0, 2**31),
    }
).filter(lambda case: case["block"] <= min(case["height"], case["width"]))


@given(cases)
@settings(max_examples=60, deadline=None)
def test_shuffling_permutes_whole_blocks(case: dict) -> None:
    height, width, block = case["height"], case["width"], case["block"]
    images = numbered(3, height, width)
    index = torch.tensor([5, 0, 123456])
    shuffled = shuffle_blocks(images, block=block, ratio=case["ratio"], index=index, seed=case["seed"])
    assert torch.equal(shuffled.flatten(1).sort().values, images.flatten(1).sort().values)
    places = torch.from_numpy(block_of_pixel(height, width, block))
    count = (height // block) * (width // block)
    assert torch.equal(shuffled[:, :, places < 0], images[:, :, places < 0])
    source = draw_blocks(images, kind="shuffle", block=block, index=index, seed=case["seed"]).source(case["ratio"])
    assert torch.equal(source.sort(dim=1).values, torch.arange(count).expand(3, -1))
    for image in range(3):
        for place in range(count):
            assert torch.equal(
                shuffled[image][:, places == place], images[image][:, places == int(source[image, place])]
            )
    assert (source != torch.arange(count)).sum(dim=1).max() <= round(case["ratio"] * count)


@given(cases)
@settings(max_examples=60, deadline=None)
def test_masking_replaces_exactly_the_chosen_blocks(case: dict) -> None:
    height, width, block = case["height"], case["width"], case["block"]
    images = numbered(2, height, width)
    masked = mask_blocks(images, block=block, ratio=case["ratio"], index=[1, 2], seed=case["seed"])
    changed = (masked != images).any(dim=1)
    places = torch.from_numpy(block_of_pixel(height, width, block)).expand(2, -1, -1)
    assert not changed[places < 0].any()
    count = (height // block) * (width // block)
    for image in range(2):
        hit = places[image][changed[image]].unique()
        assert len(hit) == round(case["ratio"] * count)


@pytest.mark.parametrize("kind", PERTURBATIONS)
def test_ratio_zero_is_the_identity(kind: str) -> None:
    images = torch.rand(4, 3, 30, 26)
    result = PERTURBATIONS[kind](images, block=7, ratio=0.0, index=range(4))
    assert torch.equal(result, images)
    assert result.data_ptr() != images.data_ptr()


@pytest.mark.parametrize("kind", PERTURBATIONS)
def test_chosen_sets_are_nested_in_the_ratio(kind: str) -> None:
    draw = draw_blocks(torch.rand(5, 3, 32, 32), kind=kind, block=4, index=range(5))
    sets = [draw.masked(ratio) for ratio in np.linspace(0, 1, 21)]
    assert all(bool((smaller <= larger).all()) for smaller, larger in pairwise(sets))
    assert [int(chosen[0].sum()) for chosen in sets] == [round(ratio * 64) for ratio in np.linspace(0, 1, 21)]


def test_masked_pixels_stay_the_same_as_the_ratio_grows() -> None:
    images = torch.rand(3, 3, 32, 32)
    some, more = (mask_blocks(images, block=8, ratio=ratio, index=range(3)) for ratio in (0.5, 0.9))
    touched = some != images
    assert torch.equal(some[touched], more[touched])


@pytest.mark.parametrize("kind", PERTURBATIONS)
@pytest.mark.parametrize("block", [1, 5, 8])
def test_same_bits_for_every_batch_size(kind: str, block: int) -> None:
    images, index = torch.rand(64, 3, 40, 33), torch.randperm(10_000)[:64]
    whole = PERTURBATIONS[kind](images, block=block, ratio=0.7, index=index, seed=3)
    for batch in (1, 7, 64):
        parts = [
            PERTURBATIONS[kind](images[i : i + batch], block=block, ratio=0.7, index=index[i : i + batch], seed=3)
            for i in range(0, 64, batch)
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", PERTURBATIONS)
@pytest.mark.parametrize("block", [1, 8, 24])
def test_same_bits_on_cuda(kind: str, block: int) -> None:
    images, index = torch.rand(9, 3, 224, 224), torch.arange(100, 109)
    here = PERTURBATIONS[kind](images, block=block, ratio=0.6, index=index)
    there = PERTURBATIONS[kind](images.cuda(), block=block, ratio=0.6, index=index.cuda())
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize(("height", "width", "block"), [(32, 32, 8), (50, 31, 7), (9, 12, 1), (16, 24, 16)])
def test_both_ways_of_moving_blocks_agree(height: int, width: int, block: int) -> None:
    draw = draw_blocks(torch.rand(3, 4, height, width), kind="shuffle", block=block, index=range(3))
    source = draw.source(0.8)
    assert torch.equal(draw.move_blocks(source), draw.move_rows(source))


@pytest.mark.parametrize("change", [{"seed": 1}, {"index": [8, 9, 10]}, {"block": 4}])
def test_draws_differ_by_seed_image_and_block(change: dict) -> None:
    images = torch.rand(3, 3, 32, 32)
    options = {"block": 8, "index": [0, 1, 2], "seed": 0}
    assert not torch.equal(
        shuffle_blocks(images, ratio=1.0, **options), shuffle_blocks(images, ratio=1.0, **(options | change))
    )


def test_shuffle_and_mask_draw_independently() -> None:
    images = torch.rand(1, 3, 64, 64)
    orders = [draw_blocks(images, kind=kind, block=8, index=[0]).order for kind in PERTURBATIONS]
    assert not torch.equal(*orders)


def test_choice_is_uniform() -> None:
    draw = draw_blocks(torch.zeros(4000, 1, 4, 4), kind="mask", block=1, index=range(4000))
    counts = draw.masked(0.25).sum(dim=0)
    # Each image chooses 4 of 16 blocks: the counts' variance is 4000·¼·¾·16/15, which chi-square must be told.
    statistic = float(((counts - 1000.0) ** 2).sum() / (4000 * 0.25 * 0.75)) * 15 / 16
    assert stats.chi2.sf(statistic, df=15) > 1e-3


def test_permutation_is_uniform_over_all_permutations() -> None:
    draw = draw_blocks(torch.zeros(24_000, 1, 2, 2), kind="shuffle", block=1, index=range(24_000))
    code = (draw.source(1.0) * torch.tensor([64, 16, 4, 1])).sum(dim=1)
    counts = code.unique(return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_every_permutation_of_a_part_is_equally_likely_too() -> None:
    """Three of four blocks: 4 choices × 6 permutations, of which the identity counts four times."""
    draw = draw_blocks(torch.zeros(24_000, 1, 2, 2), kind="shuffle", block=1, index=range(24_000), seed=5)
    source = draw.source(0.75)
    still = (source == torch.arange(4)).sum(dim=1)
    counts = still.bincount(minlength=5)[[1, 2, 4]]  # fixed points: 1 + {0, 1, 3} of the three
    assert stats.chisquare(counts.numpy(), 24_000 * np.array([2, 3, 1]) / 6).pvalue > 1e-3


def test_noise_has_the_mean_and_deviation_of_the_image_per_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.1, 0.5, 0.9]).view(1, 3, 1, 1)
    images = torch.rand(16, 3, 128, 128, generator=generator) * scale
    noise = mask_blocks(images, block=16, ratio=1.0, index=range(16))
    deviation = images.std(dim=(2, 3))
    assert ((noise.mean(dim=(2, 3)) - images.mean(dim=(2, 3))).abs() / deviation * 128).max() < 5
    assert ((noise.std(dim=(2, 3)) / deviation - 1).abs() * 128 * 2**0.5).max() < 5
    assert (noise < 0).any()
    clipped = mask_blocks(images, block=16, ratio=1.0, index=range(16), clip=True)
    assert clipped.min() == 0
    assert torch.equal(clipped, noise.clamp(0, 1))


def test_channel_statistics_agree_with_numpy() -> None:
    images = torch.randint(0, 256, (4, 3, 50, 31)) / 255
    mean, deviation = channel_statistics(images.double())
    assert np.allclose(mean.squeeze(), images.double().numpy().mean((2, 3)), atol=1e-6)
    assert np.allclose(deviation.squeeze(), images.double().numpy().std((2, 3)), atol=1e-6)
    _, flat = channel_statistics(torch.full((1, 3, 8, 8), 0.3))
    assert flat.max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_number_formats_are_kept(dtype: torch.dtype) -> None:
    images = torch.rand(4, 3, 32, 32).to(dtype)
    for perturb in PERTURBATIONS.values():
        result = perturb(images, block=8, ratio=0.5, index=range(4))
        assert result.dtype == dtype
        assert result.isfinite().all()
        assert not torch.equal(result, images)


def test_bytes_give_the_same_as_floats() -> None:
    pixels = torch.randint(0, 256, (5, 3, 30, 40), dtype=torch.uint8)
    for kind, perturb in PERTURBATIONS.items():
        draw = draw_blocks(pixels, kind=kind, block=7, index=range(5))
        for ratio in (0.0, 0.4, 1.0):
            assert torch.equal(draw.perturb(ratio), perturb(pixels / 255, block=7, ratio=ratio, index=range(5)))


@pytest.mark.parametrize("kind", PERTURBATIONS)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"block": 0}, "block must be"),
        ({"block": -8}, "block must be"),
        ({"block": 33}, "does not fit"),
        ({"block": 2.5}, "block must be"),
        ({"ratio": 1.01}, "ratio must lie in 0..1"),
        ({"ratio": -0.1}, "ratio must lie in 0..1"),
        ({"ratio": float("nan")}, "ratio must lie in 0..1"),
        ({"index": [1]}, "one whole number for each of the 2 images"),
        ({"index": [0.5, 1.5]}, "one whole number"),
        ({"images": torch.zeros(3, 32, 32)}, "images must be a float tensor"),
        ({"images": torch.zeros(2, 3, 32, 32, dtype=torch.uint8)}, "images must be a float tensor"),
    ],
)
def test_mistakes_are_named(kind: str, wrong: dict, said: str) -> None:
    options = {"images": torch.rand(2, 3, 32, 32), "block": 8, "ratio": 0.5, "index": [0, 1]} | wrong
    with pytest.raises(UserError, match=said):
        PERTURBATIONS[kind](options.pop("images"), **options)
