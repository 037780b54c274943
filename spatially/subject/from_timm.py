"""Models of timm, ours among them: `resnet50.a1_in1k`, `swin_tiny_patch4_window7_224`, `hf-hub:timm/…`, `local-dir:…`."""

from torch import nn

from spatially.errors import UserError, unknown
from spatially.subject.classes import ClassNames, imagenet
from spatially.subject.hub import cache_only_without_network
from spatially.subject.preprocessing import from_timm, size
from spatially.subject.source import Built, Request, construction, model_answers, no_weights

PREFIXES = ("hf-hub:", "hf_hub:", "local-dir:")


def build(name: str, request: Request) -> Built:
    import timm

    import spatially.models  # noqa: F401  # registers them

    options = dict(request.model_options)
    if request.num_classes is not None:
        options["num_classes"] = request.num_classes
    if not name.startswith(PREFIXES):
        check_name(name)
        configuration = timm.get_pretrained_cfg(name)
        # these models hold tables as large as the image; the others take any size as they are
        if request.input_size is not None and configuration is not None and configuration.fixed_input_size:
            options["img_size"] = request.input_size
    if options.get("in_chans", 3) != 3:
        raise UserError(
            f"model_options: in_chans must be 3, only RGB models can be measured, got {options['in_chans']}"
        )
    with construction(name, request.seed), cache_only_without_network():
        try:
            model = timm.create_model(name, pretrained=request.pretrained, **options)
        except OSError as error:
            raise no_weights(name) from error
        except RuntimeError as error:
            if request.pretrained and "pretrained" in str(error):
                raise no_weights(name) from error
            raise
    input_size = request.input_size
    if input_size is None and "img_size" in options:
        input_size = size("img_size", options["img_size"])
    return Built(
        model,
        name,
        "timm",
        from_timm(model, input_size, name),
        answers=model_answers(model),
        classes=class_names(model),
    )


def class_names(model: nn.Module) -> ClassNames:
    """The labels stored with the weights, or ImageNet's where the number of classes says which ImageNet it is."""
    number = model_answers(model)
    configuration = getattr(model, "pretrained_cfg", None) or {}
    labels = configuration.get("label_names")
    if labels is not None and len(labels) == number:
        return ClassNames(tuple(str(label) for label in labels))
    return imagenet(number) if number else ClassNames()


def check_name(name: str) -> None:
    """That timm has a model, and weights, of this name."""
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise unknown(
            "model",
            name,
            timm.list_models(),
            hint="Models of other libraries are written torchvision/NAME, hf/REPO and package.module:callable.",
        )
    tagged = timm.list_models(f"{architecture}.*", pretrained=True)
    if tag and name not in tagged:
        raise unknown("model", name, [architecture, *tagged])
