"""Image classifiers of Hugging Face transformers: `hf/REPO`, or a folder written by `save_pretrained`.

Only safetensors are read, and code that comes with a repository is never run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spatially.errors import UserError
from spatially.subject.classes import ClassNames, imagenet
from spatially.subject.hub import cache_only_without_network
from spatially.subject.preprocessing import Preprocessing, plain
from spatially.subject.source import Built, Request, construction, no_weights

PREFIX = "hf/"

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Pillow's numbers, which is how a processor's file writes them
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def build(name: str, request: Request) -> Built:
    try:
        import transformers
    except ImportError as error:
        raise UserError(f'{name} needs transformers: pip install "spatially[hf]"') from error

    place = name.removeprefix(PREFIX)
    with construction(name, request.seed), cache_only_without_network():
        try:
            configuration = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
            if request.num_classes is not None:
                configuration.num_labels = request.num_classes
            model = _model(name, place, configuration, request)
            processor = _processor(name, place)
        except OSError as error:
            raise no_weights(name) from error
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{name} is no image classifier of transformers ({str(error).splitlines()[0]})") from error
    if getattr(configuration, "num_channels", 3) != 3:
        raise UserError(f"{name} takes {configuration.num_channels} channels; only RGB models can be measured")
    return Built(
        model,
        name=_short(name),
        source="huggingface",
        preprocessing=_preprocessing(name, configuration, processor, request.input_size),
        answers=configuration.num_labels,
        classes=_class_names(configuration),
    )


def _short(name: str) -> str:
    """A folder by its own name, so that results do not tell where on a disk it was."""
    return name if name.startswith(PREFIX) else Path(name).resolve().name


def _model(name: str, place: str, configuration: Any, request: Request) -> Any:
    import transformers

    if not request.pretrained:
        return transformers.AutoModelForImageClassification.from_config(
            configuration, trust_remote_code=False, **request.model_options
        )
    model, report = transformers.AutoModelForImageClassification.from_pretrained(
        place,
        config=configuration,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=request.num_classes is not None,
        **request.model_options,
    )
    missing = sorted(report["missing_keys"])
    # a backbone alone would get a random classifier without a word, and every measurement would be of noise
    if missing and request.num_classes is None:
        raise UserError(
            f"{name} has no weights for {', '.join(missing[:8])}{', …' if len(missing) > 8 else ''}: it is not a trained "
            "classifier; give num_classes=NUMBER for one with a random classifier"
        )
    return model


def _processor(name: str, place: str) -> dict[str, Any] | None:
    """What the image processor's file says; None for a folder that has none.

    A file that is there but cannot be had must not pass for one that says nothing: the images would be normalised wrongly.
    """
    import transformers

    try:
        return transformers.AutoImageProcessor.from_pretrained(place, trust_remote_code=False).to_dict()
    except (OSError, ValueError) as error:
        if Path(place).is_dir() and not any((Path(place) / file).exists() for file in PROCESSOR_FILES):
            return None
        raise UserError(f"the image processor of {name} ({PROCESSOR_FILES[0]}) is missing or cannot be read") from error


def _class_names(configuration: Any) -> ClassNames:
    labels = configuration.id2label
    names = tuple(str(labels[index]) for index in range(configuration.num_labels))
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        return ClassNames()  # transformers' placeholder for classes without names
    is_imagenet = len(names) == 1000 and names[0].startswith("tench")
    return ClassNames(names, imagenet(1000).synsets if is_imagenet else None)


def _preprocessing(
    name: str, configuration: Any, processor: Mapping[str, Any] | None, input_size: tuple[int, int] | None
) -> Preprocessing:
    if processor is None or not (processor.get("size") or processor.get("crop_size")):
        own = getattr(configuration, "image_size", None)
        found = plain(input_size or (_sides(own) if own is not None else None), name)
        return found if processor is None else found.override(**_normalisation(processor))
    found = from_processor(processor, name)
    return found if input_size is None else found.at(input_size)


def from_processor(processor: Mapping[str, Any], name: str = "the model") -> Preprocessing:
    """An image processor's file as ours.

    A `size` of shortest_edge keeps proportions, one of height and width does not. ConvNeXt's `crop_pct` crops below 384
    pixels and squashes from there on; PoolFormer's and LeViT's enlarge the size before the crop. A processor that only
    sets the shorter side would give images of many shapes; here the centre square is taken.
    """
    if processor.get("do_flip_channel_order"):
        raise UserError(f"{name} takes its channels as blue, green, red; only RGB models can be measured")
    kind = str(processor.get("image_processor_type", processor.get("feature_extractor_type", "")))
    edge = _shortest_edge(processor.get("size"))
    resize = _sides(processor.get("size") or processor["crop_size"])
    crop = _sides(processor["crop_size"]) if processor.get("do_center_crop") else resize
    crop_mode = "center" if edge is not None else "squash"
    share, resample = processor.get("crop_pct"), processor.get("resample")
    if kind.startswith("ConvNext"):
        crop = resize
        if min(resize) < 384:
            resize = _enlarged(resize, 1 / (share or 224 / 256))
        else:
            crop_mode = "squash"
    elif share is not None:
        resize = _enlarged(resize, 1 / share)
        crop_mode = "center" if resize[0] == resize[1] else crop_mode
    elif kind.startswith("Levit") and edge is not None:
        resize = _enlarged(resize, 256 / 224)
    if not processor.get("do_resize", True):
        resize, crop_mode = crop, "center"
    return Preprocessing(
        crop,
        resize=resize,
        interpolation="bilinear" if resample is None else RESAMPLE[int(resample)],
        crop_mode=crop_mode,
        **_normalisation(processor),
    )


def _normalisation(processor: Mapping[str, Any]) -> dict[str, Any]:
    """(p · factor - mean) / std of pixels p up to 255, as (x - mean') / std' of x = p / 255."""
    scale = 255 * processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 255.0
    mean, std = [0.0] * 3, [1.0] * 3
    if processor.get("do_normalize", True) and processor.get("image_mean") is not None:
        mean = [float(value) for value in processor["image_mean"]]
        std = [float(value) for value in processor["image_std"]]
    if processor.get("rescale_offset"):
        mean = [value + 1 for value in mean]
    if processor.get("include_top"):  # EfficientNet divides by its std a second time
        std = [value * float(again) for value, again in zip(std, processor["image_std"], strict=True)]
    if scale != 1.0:
        mean, std = [value / scale for value in mean], [value / scale for value in std]
    return {"mean": mean, "std": std}


def _shortest_edge(size: Any) -> int | None:
    """A bare number means the shorter side in old files of some families and a square in others; the square is exact."""
    return size.get("shortest_edge") if isinstance(size, Mapping) else None


def _sides(size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge") or size.get("longest_edge")
        return (int(size["height"]), int(size["width"])) if "height" in size else (int(edge or 0), int(edge or 0))
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return (int(height), int(width))


def _enlarged(size: tuple[int, int], factor: float) -> tuple[int, int]:
    return (int(size[0] * factor), int(size[1] * factor))
