"""What an operation has to know of a network, whoever wrote it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from spatially.errors import UserError


@dataclass(frozen=True)
class BiasPlace:
    """A module that takes a Gaussian bias when it becomes a `kind`.

    `stem` is the module whose call tells the grid, for one that sees a row of tokens; None where it knows its grid.
    """

    name: str
    module: nn.Module
    heads: int
    kind: type[nn.Module]
    stem: nn.Module | None = None


@dataclass(frozen=True)
class Position:
    """Parameters that hold positions, and a fresh draw of them, on the CPU, from their own initialiser."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    kind: Literal["absolute", "relative"]
    fresh: Callable[[], list[Tensor]]


@dataclass(frozen=True)
class WindowLayer:
    """An attention layer with windows: `block` cuts them, `attention` attends, `table_owner` holds the position table.

    `kinds` says what each becomes when the layer is changed. `linears` are the attention's projections to queries, keys
    and values, one for all or three. Another projection goes to `attention.qkv`; `placeholders` then pass its parts on.
    """

    name: str
    block: nn.Module
    attention: nn.Module
    table_owner: nn.Module
    kinds: Mapping[nn.Module, type[nn.Module]]
    window: tuple[int, int]
    attention_dropout: float
    linears: tuple[str, ...] = ("qkv",)
    placeholders: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def table(self) -> Tensor | None:
        """The position table, if the layer has one."""
        return getattr(self.table_owner, "relative_position_bias_table", None)

    @property
    def square(self) -> tuple[int, str] | None:
        """Side and border of the square around each query, for a layer that has given up its windows."""
        return getattr(self.block, "receptive_field", None)


class Host:
    """A network that can be changed: its attention layers, its positions, and for Swin its windows."""

    def __init__(self, name: str, trunk: nn.Module) -> None:
        self.name = name
        self.trunk = trunk

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return int(getattr(self.trunk, "num_prefix_tokens", 0))

    def bias_places(self) -> list[BiasPlace]:
        """Where a Gaussian bias goes, layer by layer."""
        return []

    def positions(self) -> list[Position]:
        """Where positions are kept."""
        return []

    def window_layers(self) -> list[WindowLayer]:
        """Swin's attention layers."""
        return []


def changed_kind(name: str, module: nn.Module, kinds: Mapping[type[nn.Module], type[nn.Module]]) -> type[nn.Module]:
    """What `module` becomes, or is already. A class of the user's own computes something we do not know."""
    own = type(module)
    if own not in kinds and own not in kinds.values():
        known = ", ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{name} is a {own.__name__}, which cannot be changed: known are {known}")
    return kinds.get(own, own)


def joined_name(*parts: str) -> str:
    """Names of modules, outermost first, in one.

    >>> joined_name("", "blocks.0")
    'blocks.0'
    """
    return ".".join(part for part in parts if part)


def network_position(
    name: str, network: nn.Module, initialise: Callable[[nn.Module, str], None] = lambda layer, name: None
) -> Position:
    """A network of relative positions. `initialise` treats its linear layers after PyTorch has drawn them."""
    layers = [layer for layer in network.named_modules(prefix=name) if isinstance(layer[1], nn.Linear)]

    def fresh() -> list[Tensor]:
        draws: list[Tensor] = []
        for path, layer in layers:
            new = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            initialise(new, path)
            draws += [parameter.detach() for parameter in new.parameters()]
        return draws

    named = [(f"{path}.{own}", part) for path, layer in layers for own, part in layer.named_parameters()]
    return Position(tuple(path for path, _ in named), tuple(part for _, part in named), "relative", fresh)
