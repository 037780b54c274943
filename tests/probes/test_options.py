"""An option of a wrong type is the user's mistake, said so with the option's name."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import timm
import torch

import spatially
from spatially.data import Images
from spatially.errors import UserError
from spatially.probes import (
    PROBES,
    Cost,
    Fourier,
    FrequencyNoise,
    Hessian,
    InteractionRatio,
    Interpolation,
    Landscape,
    Paste,
    PositionBias,
    ReceptiveField,
    Robustness,
    Sensitivity,
    ShapeBias,
    Variance,
)
from spatially.probes.base import Probe

NUMBERS = ("five", None, True, -1, float("nan"), [1], {}, object())
NAMES = ("five", None, 1, ["crop"], {}, object())
WHOLE = (*NUMBERS, 2.5)
SWITCHES = ("never", None, 1, [], {}, object())
SEEDS = ("five", None, True, 2.5, [1], {}, object())
# Probe → option → what it refuses
REFUSED: dict[type[Probe], Mapping[str, tuple[object, ...]]] = {
    Hessian: {
        "count": WHOLE,
        "which": NAMES,
        "batch_size": WHOLE,
        "share": NUMBERS,
        "augmentation": NAMES,
        "weight_decay": NUMBERS,
        "parameters": (None, 1, 2.5, [], [1], {}, object()),
        "dtype": NAMES,
        "tolerance": NUMBERS,
        "products": WHOLE,
        "basis": WHOLE,
        "confirm": SWITCHES,
        "seed": SEEDS,
    },
    Landscape: {
        "points": (*WHOLE, (3, "x"), (3, 3, 3)),
        "extent": ("five", None, 1, [], (1, -1), ("a", "b"), {}, object()),
        "weight_decay": NUMBERS,
        "augmentation": NAMES,
        "style": NAMES,
        "seed": SEEDS,
    },
    FrequencyNoise: {
        "frequencies": ("five", None, True, -1, float("nan"), [], [None], {}, object()),
        "half_width": NUMBERS,
        "size": ("five", True, -1, float("nan"), [1], {}, object()),
        "style": NAMES,
        "seed": SEEDS,
    },
    Robustness: {
        "occlusion": ("five", True, -1, float("nan"), [0.5], {}, object()),
        "place": ("five", None, 1, [1], [1, 2.5], {}, object()),
        "epsilons": ("five", "1/0", True, -1, float("nan"), [None], object()),
        "imagenet_a": (1, True, [], {}, object()),
        "backgrounds": (1, True, [], {}, object()),
        "backgrounds_map": (1, True, [], {}, object()),
        "seed": SEEDS,
    },
    ShapeBias: {"seed": SEEDS},
    Sensitivity: {
        "kinds": (*NAMES, []),
        "blocks": ("five", None, True, -1, 2.5, float("nan"), [], [None], {}, object()),
        "ratios": ("five", None, True, -1, 2.5, float("nan"), [], [None], {}, object()),
        "precision": ("five", True, -1, float("nan"), [1], {}, object()),
        "seed": SEEDS,
    },
    Paste: {"block": WHOLE, "scale": NUMBERS, "seed": SEEDS},
    Fourier: {"seed": SEEDS},
    Variance: {"seed": SEEDS},
    ReceptiveField: {
        "style": NAMES,
        "layer": (None, True, 2.5, [1], {}, object()),
        "position": ("five", None, True, 1, [1], [1, 2.5], {}, object()),
        "variants": (*NAMES, []),
        "reset": NAMES,
        "baseline": NAMES,
        "tolerance": (*NUMBERS, 0),
        "seed": SEEDS,
    },
    PositionBias: {
        "position": ("five", None, True, 1, [1], [1, 2.5], {}, object()),
        "baseline": NAMES,
        "fresh": SWITCHES,
        "seed": SEEDS,
    },
    InteractionRatio: {
        "thresholds": (*NUMBERS, 0, 1, [], ["a"], [0.1, 0.1]),
        "min_heads": WHOLE,
        "renormalise": SWITCHES,
        "convolutions": NAMES,
        "seed": SEEDS,
    },
    Cost: {
        "steps": NAMES,
        "modes": NAMES,
        "batch": ("five", True, -1, 2.5, [1], {}, object()),
        "rounds": WHOLE,
        "warm_up": WHOLE,
        "seed": SEEDS,
    },
    Interpolation: {
        "towards": (1, True, [], {}, object()),
        "points": WHOLE,
        "extent": ("five", None, 1, [], (1, -1), ("a", "b"), {}, object()),
        "weight_decay": NUMBERS,
        "augmentation": NAMES,
        "seed": SEEDS,
    },
}
# What a message calls an option that holds several of a kind
SINGULAR = {"frequencies": "frequency", "epsilons": "epsilon"} | {
    f"{name}s": name for name in ("step", "mode", "kind", "block", "ratio", "variant", "threshold")
}
CASES = [
    pytest.param(probe, option, value, id=f"{probe.name}.{option}-{number}")
    for probe, options in REFUSED.items()
    for option, values in options.items()
    for number, value in enumerate(values)
]


@pytest.mark.parametrize(("probe", "option", "value"), CASES)
def test_a_wrong_option_is_named(probe: type[Probe], option: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"\b({option}|{SINGULAR.get(option, option)})\b"):
        probe(**{option: value})


@pytest.mark.parametrize("probe", REFUSED)
def test_no_option_is_left_out(probe: type[Probe]) -> None:
    assert set(REFUSED) == set(PROBES.values())
    assert set(REFUSED[probe]) == {field.name for field in fields(probe)}  # type: ignore[arg-type]


# What comes out of NumPy's functions → what it is taken as
NUMPY = (
    (Sensitivity, {"blocks": np.array([8, 16]), "precision": np.float64(0.25)}, {"blocks": (8, 16), "precision": 0.25}),
    (
        Paste,
        {"block": np.int64(8), "scale": np.float32(0.5), "seed": np.int64(3)},
        {"block": 8, "scale": 0.5, "seed": 3},
    ),
    (Robustness, {"occlusion": np.int64(5), "place": np.array([0, 2])}, {"occlusion": 5, "place": (0, 2)}),
    (Robustness, {"occlusion": (np.int64(4), np.float64(0.5))}, {"occlusion": (4, 0.5)}),
    (Landscape, {"points": np.array([5, 7]), "extent": np.linspace(-1, 1, 2)}, {"points": (5, 7), "extent": (-1, 1)}),
    (Hessian, {"count": np.int32(3), "confirm": np.True_}, {"count": 3, "confirm": True}),
    (Cost, {"rounds": np.int64(4)}, {"rounds": 4}),
)


@pytest.mark.parametrize(("probe", "given", "plain"), NUMPY)
def test_numbers_of_numpy_are_numbers(probe: type[Probe], given: dict[str, Any], plain: dict[str, Any]) -> None:
    """Also where the options are written down, as every result's are."""
    assert json.loads(json.dumps(probe(**given).options())) == json.loads(json.dumps(probe(**plain).options()))


@pytest.mark.parametrize("probe", [InteractionRatio(), Fourier(), Variance(), PositionBias(), ReceptiveField()])
def test_no_images(probe: Probe) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=8, num_heads=2, depth=1, num_classes=2)
    subject = spatially.load(model, input_size=32, device="cpu")
    none = np.arange(0)
    images = Images(
        pixels=np.zeros((0, 3, 32, 32), np.uint8), labels=none, index=none, description="none", fingerprint="none"
    )
    with pytest.raises(UserError, match="at least one"):
        probe.run(subject, images)


@pytest.mark.parametrize("wrong", ["resnet50", torch.nn.Linear(2, 2), torch.rand(2, 3, 32, 32)])
def test_what_is_no_subject_or_no_images_is_told_how_to_become_it(
    wrong: Any, subject: spatially.Subject, memory_images: Images
) -> None:
    came = f"came as {type(wrong).__name__}"
    with pytest.raises(UserError, match=rf"subject must be what spatially\.load.*{came}"):
        Paste().run(wrong, memory_images)
    with pytest.raises(UserError, match=rf"images must be what spatially\.open_images.*{came}"):
        Paste().run(subject, wrong)
