"""Models of torchvision: `torchvision/resnet50`."""

from typing import Any

from spatially.errors import UserError, unknown
from spatially.subject.classes import ClassNames, imagenet
from spatially.subject.preprocessing import Preprocessing
from spatially.subject.source import Built, Request, construction, no_weights

PREFIX = "torchvision/"


def build(name: str, request: Request) -> Built:
    """The newest weights of a model, or random ones; its preprocessing is that of the newest weights in both cases."""
    from torchvision import models

    short = name.removeprefix(PREFIX)
    known = models.list_models(module=models)
    if short not in known:
        raise unknown("model", name, [PREFIX + each for each in known])
    weights = models.get_model_weights(short).DEFAULT
    categories = tuple(weights.meta["categories"])
    answers = request.num_classes or request.model_options.get("num_classes") or len(categories)
    if request.pretrained and answers != len(categories):
        raise UserError(
            f"num_classes: the weights of {name} have {len(categories)} classes, got {answers}; "
            "give pretrained=False or checkpoint=FILE with it"
        )
    options = dict(request.model_options) | ({} if request.pretrained else {"num_classes": answers})
    if not request.pretrained and short in ("googlenet", "inception_v3"):
        options.setdefault("init_weights", True)  # its default, said so that it does not warn
    with construction(name, request.seed):
        try:
            model = models.get_model(short, weights=weights if request.pretrained else None, **options)
        except OSError as error:
            raise no_weights(name) from error
    preprocessing = from_weights(weights)
    if request.input_size is not None:
        preprocessing = preprocessing.at(request.input_size)
    named = answers == len(categories)
    classes = ClassNames(categories, imagenet(answers).synsets) if named else ClassNames()
    return Built(model, name, "torchvision", preprocessing, answers=answers, classes=classes)


def from_weights(weights: Any) -> Preprocessing:
    """torchvision's evaluation preset as ours: shorter side to `resize_size`, then the centre."""
    preset = weights.transforms()
    crop, resize = preset.crop_size[0], preset.resize_size[0]
    return Preprocessing(
        (crop, crop),
        resize=(resize, resize),
        mean=preset.mean,
        std=preset.std,
        interpolation=preset.interpolation.value,
    )
