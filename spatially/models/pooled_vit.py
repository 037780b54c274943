"""ViT with pooling and without, in pairs that cost the same (Heo et al., section 3.2, figure 3).

`vit_*_unpooled` is ViT as DeiT trains it: 16×16 patches, 12 blocks, one width, a position for every token, the class token
included. It takes the weights of timm's `deit_*_patch16_224` and `vit_*_patch16_224`.

`vit_*_pooled` has PiT's pooling switched on: again 12 blocks of the same kind, (2, 6, 4) before, between and behind two
pools that halve the grid and double width and heads; 16×16 patches every 8 pixels, so that the middle stage has the grid of
the unpooled one. Figure 3 compares "at the same computation cost", so the first width [open: the paper prints none] is the
one that brings the multiply-adds at 224 within 1 % of its partner's, in heads close to ViT's 64 wide:

| pair  | unpooled: width, heads | GMACs | pooled: widths, heads           | GMACs |
|-------|------------------------|-------|---------------------------------|-------|
| tiny  | 192, 3                 | 1.25  | 90, 180, 360 in 2, 4, 8         | 1.25  |
| small | 384, 6                 | 4.60  | 186, 372, 744 in 3, 6, 12       | 4.59  |
| base  | 768, 12                | 17.56 | 378, 756, 1512 in 6, 12, 24     | 17.50 |

Both start from the same draws (`weight_init="vit"`). Both give three maps, after blocks 2, 8 and 12: strides 8, 16, 32 with
pools, 16 throughout without.
"""

import re

import torch
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.models import pit
from spatially.models.registry import register
from spatially.models.weights import Grid, StateDict, token_grid, unwrap

DEPTHS = (2, 6, 4)


def checkpoint_filter(state_dict: StateDict, model: nn.Module) -> StateDict:
    """Weights of timm's and the authors' ViT and DeiT (one list of blocks, positions as tokens), or ours, for `model`.

    Positions are resized from the grid that `weights.token_grid` takes them to be of.
    """
    state_dict = unwrap(state_dict)
    if "patch_embed.proj.weight" not in state_dict:
        return pit.checkpoint_filter(state_dict, model)
    depths = [len(stage.blocks) for stage in model.transformers]  # type: ignore[union-attr]
    places = [f"transformers.{stage}.blocks.{block}." for stage, depth in enumerate(depths) for block in range(depth)]
    _check(state_dict, blocks=len(places))
    result = {}
    for name, value in state_dict.items():
        name = re.sub(r"^blocks\.(\d+)\.", lambda match: places[int(match[1])], name)
        result[name.replace("patch_embed.proj.", "patch_embed.conv.")] = value
    if "dist_token" in result:
        result["cls_token"] = torch.cat((result["cls_token"], result.pop("dist_token")), dim=1)
    height, width = model.get_parameter("pos_embed").shape[-2:]
    prefix, result["pos_embed"] = _split(result["pos_embed"], (height, width), prefix=result["cls_token"].shape[1])
    # Positions for the patches alone (DeiT-III, big_vision): the class token's is zero.
    result["cls_pos_embed"] = torch.zeros_like(result["cls_token"]) if prefix is None else prefix
    return pit.checkpoint_filter(result, model)


def _check(weights: StateDict, *, blocks: int) -> None:
    """What has no place in these models, said before a name is missed."""
    numbers = {int(match[1]) for name in weights if (match := re.match(r"blocks\.(\d+)\.", name))}
    if numbers != set(range(blocks)):
        raise UserError(f"weights must have {blocks} blocks for this model: got {len(numbers)}")
    if "reg_token" in weights or "register_tokens" in weights:
        raise UserError("weights must be without register tokens: this model has a class token alone")
    for name in ("cls_token", "pos_embed"):
        if name not in weights:
            raise UserError(f"weights must have {name}: this model reads a class token and adds positions")


def _split(positions: Tensor, grid: Grid, *, prefix: int) -> tuple[Tensor | None, Tensor]:
    """Positions as tokens, (1, tokens, channels), to those of the prefix tokens and a map of the others."""
    before, source = token_grid(positions.shape[1], grid, prefix=prefix)
    table = positions[:, before:].transpose(1, 2).unflatten(2, source).contiguous()
    return (positions[:, :before] if before else None), table


def _register(size: str, *, width: int, heads: int, pooled_width: int, pooled_heads: int) -> None:
    for pool in (False, True):
        growth = (1, 2, 4) if pool else (1, 1, 1)
        register(
            f"vit_{size}_pooled" if pool else f"vit_{size}_unpooled",
            pit.PoolingTransformer,
            module=__name__,
            paper="heo",
            what=f"ViT, {size}, " + ("with PiT's pooling at the cost of its partner" if pool else "without pooling"),
            options={
                "stride": 8 if pool else 16,
                "dims": tuple((pooled_width if pool else width) * factor for factor in growth),
                "heads": tuple((pooled_heads if pool else heads) * factor for factor in growth),
                "depths": DEPTHS,
                "pool": pool,
                "class_position": True,
                "weight_init": "vit",
            },
            checkpoint_filter=checkpoint_filter,
            out_indices=range(3),
            first_conv="patch_embed.conv",
            classifier="head",
        )


_register("tiny", width=192, heads=3, pooled_width=90, pooled_heads=2)
_register("small", width=384, heads=6, pooled_width=186, pooled_heads=3)
_register("base", width=768, heads=12, pooled_width=378, pooled_heads=6)
