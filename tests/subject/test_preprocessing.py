from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torchvision.models import get_model_weights
from torchvision.transforms.functional import pil_to_tensor

from spatially.errors import UserError
from spatially.subject import Preprocessing
from spatially.subject.from_huggingface import from_processor
from spatially.subject.from_torchvision import from_weights
from spatially.subject.preprocessing import from_timm, plain


@pytest.fixture(scope="module")
def image() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (301, 417, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def normalised(preprocessing, image):
    pixels = torch.from_numpy(preprocessing.crop(image)).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    return (pixels - mean) / std


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("share", [0.875, 0.95, 1.0])
def test_timm_configuration_gives_timms_transform(image, crop_mode, share):
    model = timm.create_model("resnet18", pretrained_cfg_overlay={"crop_pct": share, "crop_mode": crop_mode})
    expected = create_transform(**resolve_model_data_config(model), is_training=False)(image)
    torch.testing.assert_close(normalised(from_timm(model, None, "resnet18"), image), expected)


@pytest.mark.parametrize("name", ["resnet50", "swin_v2_t", "vit_b_16", "efficientnet_b0"])
def test_torchvision_weights_give_torchvisions_transform(image, name):
    weights = get_model_weights(name).DEFAULT
    torch.testing.assert_close(normalised(from_weights(weights), image), weights.transforms()(image))


def processors():
    transformers = pytest.importorskip("transformers")
    for name, size in [
        ("ViT", {"height": 64, "width": 48}),
        ("ConvNext", {"shortest_edge": 224}),
        ("ConvNext", {"shortest_edge": 384}),
        ("PoolFormer", {"shortest_edge": 224}),
        ("Levit", {"shortest_edge": 224}),
        ("DeiT", {"height": 256, "width": 256}),
        ("CLIP", {"shortest_edge": 224}),
        ("EfficientNet", {"height": 64, "width": 64}),
    ]:
        yield getattr(transformers, f"{name}ImageProcessorPil")(size=size)


@pytest.mark.parametrize("index", range(8))
def test_huggingface_processors_give_their_own_pixels(image, index):
    processor = list(processors())[index]
    # to leave out an odd number of pixels the libraries round differently, at times; not for any processor with this size
    image = image.resize((400, 300))
    expected = torch.as_tensor(np.asarray(processor(image)["pixel_values"][0]))
    preprocessing = from_processor(processor.to_dict())
    torch.testing.assert_close(normalised(preprocessing, image), expected, atol=1e-5, rtol=1e-5)


def test_huggingface_without_rescaling_or_normalising():
    base = {"size": {"height": 8, "width": 8}, "image_mean": [127.5] * 3, "image_std": [255.0] * 3}
    raw = from_processor({**base, "do_rescale": False})
    np.testing.assert_allclose((raw.mean, raw.std), ([0.5] * 3, [1.0] * 3))
    plain_pixels = from_processor({**base, "do_normalize": False})
    assert (plain_pixels.mean, plain_pixels.std) == ((0.0,) * 3, (1.0,) * 3)


def test_huggingface_of_other_channel_order_is_refused():
    with pytest.raises(UserError, match="blue, green, red"):
        from_processor({"do_flip_channel_order": True})


def test_resize_is_exact(image):
    preprocessing = Preprocessing((224, 224), resize=(232, 232), interpolation="bilinear")
    expected = image.resize((int(232 * 417 / 301), 232), Image.Resampling.BILINEAR)
    left, top = round((expected.width - 224) / 2), 4
    expected = pil_to_tensor(expected.crop((left, top, left + 224, top + 224)))
    np.testing.assert_array_equal(preprocessing.crop(image), expected)


def test_image_of_the_right_size_is_untouched(image):
    pixels = Preprocessing((301, 417), resize=(301, 417)).crop(image)
    np.testing.assert_array_equal(pixels, np.asarray(image).transpose(2, 0, 1))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous


def test_oblong_crop_covers_and_keeps_its_interpolation(image):
    preprocessing = Preprocessing((100, 50), resize=(100, 50), interpolation="nearest")
    pixels = preprocessing.crop(image)
    assert pixels.shape == (3, 100, 50)
    scaled = np.asarray(image.resize((139, 100), Image.Resampling.NEAREST))
    np.testing.assert_array_equal(pixels, scaled[:, 44:94].transpose(2, 0, 1))


def test_threads_agree(image):
    preprocessing = Preprocessing((40, 40), resize=(51, 51))
    with ThreadPoolExecutor(4) as pool:
        crops = list(pool.map(preprocessing.crop, [image] * 16))
    for crop in crops:
        np.testing.assert_array_equal(crop, preprocessing.crop(image))


def test_other_sizes_see_the_same_share():
    assert Preprocessing((224, 224), resize=(256, 256)).at((112, 448)).resize == (128, 512)


def test_overrides():
    base = plain((20, 40), "mine")
    assert base.normalisation == "none given"
    changed = base.override(resize=30, mean=(0.1, 0.2, 0.3), interpolation="box", crop_mode="squash")
    assert changed.resize == (30, 60)
    assert (changed.mean, changed.std) == ((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    assert (changed.interpolation, changed.crop_mode, changed.normalisation) == ("box", "squash", "given")
    assert changed.describe()["resize"] == [30, 60]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": (0.5,)}, "mean: must be three numbers"),
        ({"mean": 0.5}, "mean: must be three numbers"),
        ({"std": (1, 0, 1)}, "std: every number must be above 0"),
        ({"std": (1, float("nan"), 1)}, "std: must be three numbers"),
        ({"input_size": (0, 3)}, "input_size: must be one whole number above 0"),
        ({"input_size": (3, 3, 3)}, "input_size: must be"),
        ({"input_size": 2.5}, "input_size: must be"),
        ({"resize": -1}, "resize: must be"),
        ({"interpolation": "cubic"}, "interpolation: must be one of nearest.*got 'cubic'"),
        ({"crop_mode": "middle"}, "crop_mode: must be one of center"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(UserError, match=message):
        Preprocessing(**{"input_size": (8, 8), "resize": (8, 8), **change})


def test_a_resize_smaller_than_the_crop_is_refused_by_hand_and_framed_where_published():
    with pytest.raises(UserError, match="resize: must be at least input_size"):
        plain((8, 8), "mine").override(resize=7)
    framed = Preprocessing((8, 8), resize=(6, 6)).crop(Image.new("RGB", (12, 12), "white"))
    assert framed.sum() == 3 * 6 * 6 * 255


def test_other_modes_and_channels_are_refused():
    with pytest.raises(ValueError, match="RGB, got L"):
        Preprocessing((8, 8), resize=(8, 8)).crop(Image.new("L", (8, 8)))
    model = torch.nn.Identity()
    model.pretrained_cfg = {"input_size": (1, 28, 28)}
    with pytest.raises(UserError, match="takes images of 1 channels"):
        from_timm(model, None, "mnist")
