"""Which weights exactly: one short name for the contents of a model."""

import hashlib
from functools import cached_property

import torch
from torch import Tensor, nn


class Fingerprint:
    """BLAKE2b over the names, shapes, types and bytes of everything in a state dict, computed when first asked for.

    The same weights give the same fingerprint on every device and in every memory format. It is computed once: weights
    that change later need `forget`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def forget(self) -> None:
        """Compute it anew when it is asked for again."""
        vars(self).pop("hexadecimal", None)

    @cached_property
    def hexadecimal(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self._model.state_dict().items()):
            if not isinstance(
                value, Tensor
            ):  # a module's extra state: no weights, and no bytes that mean the same twice
                continue
            digest.update(f"{name} {list(value.shape)} {value.dtype};".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()
