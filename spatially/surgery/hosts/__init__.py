"""Which networks can be changed, and how each keeps what an operation changes: one file for each library."""

from importlib import import_module

from torch import nn

from spatially.errors import UserError
from spatially.surgery.hosts.base import BiasPlace, Host, Position, WindowLayer

# The files are imported when a model of that library comes: it is loaded then anyway, and nobody else waits for it.
FILES = {
    "timm": "from_timm",
    "transformers": "from_huggingface",
    "torchvision": "from_torchvision",
    "spatially": "from_spatially",
}
KINDS = "timm, Hugging Face, torchvision and spatially"
SUPPORTED = (
    f"ViT and Swin (its first version) of {KINDS}, DeiT and BEiT of timm and Hugging Face, "
    "ViT with relative positions and PiT of timm and spatially"
)


def find(model: nn.Module) -> list[Host]:
    """The networks in a model that can be changed, outermost first, whatever wraps them."""
    hosts: list[Host] = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and (found := _host(name, module)) is not None:
            hosts.append(found)
            inside.update(module.modules())
    return hosts


def _host(name: str, module: nn.Module) -> Host | None:
    for package in {kind.__module__.partition(".")[0] for kind in type(module).__mro__} & set(FILES):
        try:
            library = import_module(f"spatially.surgery.hosts.{FILES[package]}")
        except ImportError as error:
            raise UserError(f"{type(module).__name__} is of a version of {package} that is not supported") from error
        if (host := library.host(name, module)) is not None:
            return host
    return None


__all__ = ["KINDS", "SUPPORTED", "BiasPlace", "Host", "Position", "WindowLayer", "find"]
