"""A study as the study room writes it, made by code: accuracy that falls like real models' does."""

import json

import numpy as np
import xarray as xr

# name: (clean accuracy, ratio of half collapse per log2 of the block size, what is left at ratio 1)
MODELS = {
    "resnet50.a1_in1k": (0.80, 0.12, 0.02),
    "swin_tiny_patch4_window7_224.ms_in1k": (0.81, 0.75, 0.55),
    "vit_base_patch8_224.augreg_in21k": (0.85, 0.85, 0.72),
    "vit_small_r26_s32_224.augreg_in21k": (0.82, 0.35, 0.22),
}
RATIOS = np.round(np.linspace(0, 1, 11), 1)


def accuracy_curve(clean, half, rest, *, kind, block, chance):
    """A fall from ``clean`` towards ``rest``, later and milder for larger blocks."""
    grow = np.log2(block / 8)
    half = half * (1 + 0.35 * grow) * (1.2 if kind == "mask" else 1)
    rest = min(0.97, rest + 0.1 * grow) if kind == "shuffle" else 0.02
    kept = rest + (1 - rest) / (1 + (RATIOS / half) ** 3)
    kept = (kept - kept[-1]) / (1 - kept[-1]) * (1 - rest) + rest
    return chance + (clean - chance) * kept


def attributes(name, *, probe, images, chance, **more):
    return {
        "probe": probe,
        "definition": "Top-1 accuracy on images whose blocks are shuffled or masked, for each k and α.",
        "model": name,
        "weights": f"sha256:{len(name):012x}",
        "parameters": 1_000_000 * len(name),
        "preprocessing": json.dumps(
            {"resize": 248, "crop": 224, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
        ),
        "data": "ImageNet-1K validation, first images of each class",
        "data_fingerprint": "blake2b:5f0c9e77a1d24b3c",
        "images": images,
        "skipped": 2,
        "skipped_names": json.dumps(["n01440764/broken.JPEG", "n01443537/empty.JPEG"]),
        "classes": round(1 / chance),
        "class_names": "[]",
        "chance": chance,
        "seed": 0,
        "options": json.dumps({"blocks": [8, 16, 24, 32], "kinds": ["shuffle", "mask"], "ratios": RATIOS.tolist()}),
        "precision": 0.02,
        "interval": "95 % Wilson score intervals for rates, percentile bootstrap over images for summaries.",
        "device": "cpu",
        "dtype": "float32",
        "batch": 64,
        "versions": json.dumps({"spatially": "0.1.0", "torch": "2.15.0", "timm": "1.0.20", "python": "3.11.7"}),
        "command": f"spatially probe {name} --data imagenet/val --out runs/compare",
        **more,
    }


def make_sensitivity(
    name, shape, *, kinds=("shuffle", "mask"), blocks=(8, 16, 24, 32), images=400, chance=0.01, seed=0, **more
):
    generator = np.random.default_rng([seed, len(name)])
    expected = np.array([[accuracy_curve(*shape, kind=k, block=b, chance=chance) for b in blocks] for k in kinds])
    draw = generator.random((images, len(kinds), len(blocks), 1))  # common random numbers over ratios
    correct = draw < expected
    probability = np.clip(0.35 + 0.55 * expected - 0.3 * draw, 0.01, 0.99).astype("float32")
    accuracy = correct.mean(0)
    half = 1.96 * np.sqrt(accuracy * (1 - accuracy) / images + 1 / images**2)
    with np.errstate(invalid="ignore"):
        confidence = np.where(correct, probability, 0).sum(0) / np.where(correct.sum(0), correct.sum(0), np.nan)
    above = (accuracy - chance) / np.maximum(accuracy[..., :1] - chance, 1e-9)
    area = 1 - np.trapezoid(above, RATIOS, axis=-1)
    dims = ("kind", "block", "ratio")
    variables = {
        "correct": (("image", *dims), correct),
        "probability": (("image", *dims), probability),
        "prediction": (("image", *dims), np.zeros(correct.shape, dtype="int32")),
        "measured": (dims, np.full(accuracy.shape, images)),
        "covered": ("block", [(224 // b * b) ** 2 / 224**2 for b in blocks]),
    }
    spread = {"accuracy": half, "average_confidence": np.where(np.isfinite(confidence), 0.02, np.nan)}
    for key, value in {"accuracy": accuracy, "average_confidence": confidence}.items():
        variables[key] = (dims, value)
        variables[key + "_low"] = (dims, np.clip(value - spread[key], 0, 1))
        variables[key + "_high"] = (dims, np.clip(value + spread[key], 0, 1))
    summaries = {"sensitivity_area": (("kind", "block"), area)}
    if "shuffle" in kinds:
        summaries["structure_reliance"] = (("block",), np.clip(1 - above[kinds.index("shuffle"), :, -1], 0, 1))
    for key, (where, value) in summaries.items():
        variables[key] = (where, value)
        variables[key + "_low"] = (where, np.clip(value - 0.03, 0, 1))
        variables[key + "_high"] = (where, np.clip(value + 0.03, 0, 1))
    coords = {
        "image": np.arange(images, dtype="int64"),
        "kind": list(kinds),
        "block": list(blocks),
        "ratio": RATIOS,
        "label": ("image", np.arange(images) % round(1 / chance)),
    }
    attrs = attributes(name, probe="Sensitivity", images=images, chance=chance, **more)
    return xr.Dataset(variables, coords, attrs)


def make_blind(name):
    """A model that is no better than chance: its summaries are undefined."""
    dataset = make_sensitivity(name, (0.011, 0.5, 0.5), images=400)
    dataset["accuracy"][:] = 0.0075
    for key in ("average_confidence", "structure_reliance", "sensitivity_area"):
        for end in ("", "_low", "_high"):
            dataset[key + end][:] = np.nan
    return dataset


def make_paste(name, host, guest, *, images=400):
    rates = {"host_rate": host, "guest_rate": guest, "neither_rate": 1 - host - guest}
    rates |= {"mean_host_probability": host * 0.8, "mean_guest_probability": guest * 0.7}
    variables = {}
    for key, value in rates.items():
        variables |= {key: value, key + "_low": max(value - 0.04, 0), key + "_high": min(value + 0.04, 1)}
    draw = np.random.default_rng(len(name)).random(images)
    variables["host_probability"] = ("image", draw.astype("float32"))
    variables["guest_probability"] = ("image", (1 - draw).astype("float32"))
    variables["host_wins"] = ("image", draw < host)
    variables["guest_wins"] = ("image", draw > 1 - guest)
    number = np.arange(images)
    coords = {"image": number, "label": ("image", number % 100)}
    coords |= {"guest": ("image", (number + 7) % images), "guest_label": ("image", (number + 7) % 100)}
    definition = "The host image fully shuffled (k = 16), a clean guest image in its centre: whose label wins."
    attrs = attributes(name, probe="Paste", images=images, chance=0.01) | {
        "definition": definition,
        "options": '{"block": 16}',
    }
    return xr.Dataset(variables, coords, attrs)


def make_examples(count=3, side=224):
    """Pictures with large forms and fine texture, so that shuffling and masking show."""
    y, x = np.mgrid[0:side, 0:side] / side
    pictures = []
    for i in range(count):
        generator = np.random.default_rng(i)
        sky = np.stack([0.55 + 0.25 * y, 0.7 + 0.1 * y, 0.9 - 0.2 * y])
        ground = np.stack([0.35 + 0 * x, 0.5 + 0.1 * np.sin(40 * x), 0.25 + 0 * x])
        picture = np.where(y > 0.65 + 0.05 * np.sin(6 * x + i), ground, sky)
        for radius, colour in ((0.28, (0.80, 0.35, 0.18)), (0.19, (0.95, 0.85, 0.7)), (0.08, (0.12, 0.12, 0.18))):
            disc = (x - 0.5 - 0.05 * i) ** 2 + ((y - 0.5) * 1.15) ** 2 < radius**2
            picture = np.where(disc, np.array(colour)[:, None, None] * (0.9 + 0.1 * np.sin(90 * (x + y))), picture)
        pictures.append(np.clip(picture + generator.normal(0, 0.015, picture.shape), 0, 1))
    pixels = (np.stack(pictures) * 255).astype("uint8")
    coords = {"index": ("example", np.arange(count)), "label": ("example", np.arange(count))}
    coords |= {"class_name": ("example", [f"class {i}" for i in range(count)])}
    return xr.Dataset({"pixels": (("example", "channel", "y", "x"), pixels)}, coords, {"seed": 0})


class Study:
    """The makers above under one name: tests take it with `runpy.run_path`, as they cannot import this file."""

    MODELS, RATIOS = MODELS, RATIOS
    sensitivity = staticmethod(make_sensitivity)
    blind = staticmethod(make_blind)
    paste = staticmethod(make_paste)
    examples = staticmethod(make_examples)

    @staticmethod
    def results(**options):
        return {name: make_sensitivity(name, shape, **options) for name, shape in MODELS.items()}

    @staticmethod
    def paste_results():
        rates = [(0.08, 0.75), (0.62, 0.14), (0.71, 0.11), (0.34, 0.4)]
        return {name: make_paste(name, *rate) for name, rate in zip(MODELS, rates, strict=True)}
