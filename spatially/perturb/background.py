"""Another background (Xiao et al. 2020): ``x' = mask · foreground + (1 − mask) · background``, in pixels."""

from torch import Tensor

from spatially.errors import UserError
from spatially.perturb.check import check_images


def replace_background(foreground: Tensor, mask: Tensor, background: Tensor) -> Tensor:
    """Every foreground on every background: (F, C, H, W), (F, 1, H, W) and (B, C, H, W) give (F, B, C, H, W)."""
    check_images(foreground, name="foreground")
    check_images(mask, name="mask")
    check_images(background, name="background")
    if foreground.shape[1:] != background.shape[1:] or mask.shape != (len(foreground), 1, *foreground.shape[2:]):
        shapes = ", ".join(str((*one.shape,)) for one in (foreground, mask, background))
        raise UserError(f"foreground, mask and background must be of one size, but came as {shapes}")
    share = mask[:, None]
    return share * foreground[:, None] + (1 - share) * background[None]
