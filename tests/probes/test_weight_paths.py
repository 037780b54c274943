"""Planes and lines of weights against hand computations in float64."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.func import functional_call

from spatially import randomness
from spatially.errors import NotApplicable, UserError
from spatially.probes.weight_paths import Line, Plane, check_real, direction, moved_parameters


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    ).double()


def test_every_filter_keeps_its_norm() -> None:
    model = network()
    plane = Plane(model, seed=0)
    for one in plane.directions:
        assert list(one) == ["0.weight", "5.weight"]
        for name, moved in one.items():
            weight = model.get_parameter(name)
            wanted = torch.stack([part.square().sum().sqrt() for part in weight])
            assert torch.allclose(torch.stack([part.square().sum().sqrt() for part in moved]), wanted, rtol=1e-12)
    first, second = (torch.cat([part.flatten() for part in one.values()]) for one in plane.directions)
    assert abs(float(first @ second / first.norm() / second.norm())) < 0.2


def test_what_has_one_dimension_and_what_holds_positions_stays() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=1)
    moved = moved_parameters(model)
    assert "pos_embed" not in moved
    assert all(model.get_parameter(name).ndim >= 2 for name in moved)
    assert {name for name, one in model.named_parameters() if one.ndim >= 2} - set(moved) == {"pos_embed"}
    swin = timm.create_model("swin_tiny_patch4_window7_224", num_classes=3, depths=(1, 1, 1, 1))
    assert not any("relative_position" in name for name in moved_parameters(swin))


def test_a_quadratic_gives_its_exact_bowl() -> None:
    """½‖x W₀ᵀ − y‖² over the plane is ½‖r + a u + b v‖², r, u and v the residual and both directions' images."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3, bias=False).double()
    inputs, targets = torch.randn(10, 4, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)
    plane = Plane(model, seed=5)
    rest = model(inputs) - targets
    parts = [inputs @ one["weight"].T for one in plane.directions]
    for a, b in [(0.0, 0.0), (1.0, 0.0), (-0.3, 0.7), (2.0, -1.5)]:
        plane.move(a, b)
        found = (functional_call(model, plane.weights, (inputs,)) - targets).square().sum() / 2
        gram = torch.stack([rest, *parts]).flatten(1)
        gram = gram @ gram.T
        place = torch.tensor([1, a, b], dtype=torch.float64)
        assert float(found.detach()) == pytest.approx(float((place @ gram @ place / 2).detach()), rel=1e-12)


def test_the_origin_is_the_models_own_bits_and_nothing_is_allocated() -> None:
    model = network().float()
    plane = Plane(model, seed=0)
    where = {name: one.data_ptr() for name, one in plane.weights.items()}
    plane.move(0.7, -0.2)
    assert not torch.equal(plane.weights["0.weight"], model[0].weight)
    plane.move(0.0, 0.0)
    for name, one in plane.weights.items():
        assert torch.equal(one, model.get_parameter(name))
        assert one.data_ptr() == where[name]
        assert one.data_ptr() % 64 == 0


def test_squared_norms_of_all_parameters() -> None:
    model = network()
    plane = Plane(model, seed=2)
    for a, b in [(0.0, 0.0), (0.4, -1.1)]:
        plane.move(a, b)
        wanted = [plane.weights.get(name, one.detach()).square().sum() for name, one in model.named_parameters()]
        assert sorted(plane.squared_norms(a, b).tolist()) == pytest.approx(sorted(map(float, wanted)), rel=1e-12)


def test_authors_normalise_over_the_first_dimension() -> None:
    weight = torch.randn(4, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = direction("some.weight", weight, 1, seed=9, style="authors")
    key = randomness.stream(9, "direction", 1, "some.weight")
    drawn = randomness.normal(key, torch.zeros(1, dtype=torch.int64), (4, 1, 12)).flatten().view(4, 3, 2, 2).double()
    for c in range(3):
        for y in range(2):
            for x in range(2):
                own, wanted = (sum(float(one[i, c, y, x]) ** 2 for i in range(4)) ** 0.5 for one in (drawn, weight))
                assert torch.allclose(found[:, c, y, x], drawn[:, c, y, x] * wanted / (own + 1e-7), rtol=1e-12)


def test_a_direction_depends_on_its_name_alone() -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    one = direction("head.weight", weight, 0, seed=0)
    assert torch.equal(one, direction("head.weight", weight.clone(), 0, seed=0))
    for other in (
        direction("body.weight", weight, 0, seed=0),
        direction("head.weight", weight, 1, seed=0),
        direction("head.weight", weight, 0, seed=1),
    ):
        assert not torch.equal(one, other)
    zero = direction("head.weight", torch.zeros(5, 7), 0, seed=0)
    assert torch.equal(zero, torch.zeros(5, 7))


def test_directions_are_gaussian() -> None:
    weight = torch.ones(1, 100_000)
    drawn = direction("weight", weight, 0, seed=0)[0].double()
    assert abs(float(drawn.mean())) < 0.01
    assert float(drawn.square().mean()) == pytest.approx(1, rel=1e-5)
    assert float((drawn**4).mean()) == pytest.approx(3, rel=0.05)


def test_memory_formats_stay() -> None:
    model = network().to(memory_format=torch.channels_last)
    plane = Plane(model, seed=0)
    plain = Plane(network(), seed=0)
    plane.move(0.3, 0.1)
    plain.move(0.3, 0.1)
    assert plane.weights["0.weight"].stride() == model[0].weight.stride()
    assert torch.equal(plane.weights["0.weight"], plain.weights["0.weight"])


def test_a_model_of_vectors_has_no_plane() -> None:
    with pytest.raises(NotApplicable, match="no filters to move"):
        Plane(nn.BatchNorm2d(3), seed=0)


def test_the_line_ends_at_both_models() -> None:
    one, other = network(), network()
    with torch.no_grad():
        for tensor in (*other.parameters(), other[1].running_mean):
            tensor.add_(torch.randn_like(tensor))
        other[1].running_var.mul_(3)
    line = Line(one, other)
    for t, model in ((0.0, one), (1.0, other)):
        line.move(t)
        for name, weight in line.weights.items():
            assert torch.equal(weight, model.state_dict()[name]), (t, name)
    assert set(line.weights) == set(one.state_dict()) - {"1.num_batches_tracked"}


def test_the_line_between_and_beyond() -> None:
    one, other = network(), copy.deepcopy(network())
    with torch.no_grad():
        other[0].weight.mul_(-2)
        other[1].running_var.fill_(0.25)
    line = Line(one, other)
    line.move(1.5)
    assert torch.allclose(line.weights["0.weight"], -0.5 * one[0].weight + 1.5 * other[0].weight, rtol=1e-12)
    assert torch.equal(line.weights["1.running_var"], other[1].running_var)  # no variance below 0
    line.move(0.25)
    assert torch.allclose(line.weights["1.running_var"], torch.full((6,), 0.8125, dtype=torch.float64))
    wanted = sum(float(line.weights[name].square().sum()) for name, _ in one.named_parameters())
    assert float(line.squared_norms(0.25).sum()) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_directions_agree_on_a_gpu() -> None:
    weight = torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(0))
    on_gpu = direction("weight", weight.cuda(), 0, seed=0).cpu()
    assert torch.allclose(on_gpu, direction("weight", weight, 0, seed=0), rtol=1e-6, atol=0)


class Shared(nn.Module):
    """Two layers with one weight, and with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.second.weight = self.first.weight
        for layer in (self.first, self.second):
            layer.register_buffer(
                "mean", torch.ones(4, dtype=torch.float64) if layer is self.first else self.first.mean
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs) + self.first.mean) * self.second.mean


def test_weights_that_layers_share_move_together() -> None:
    torch.manual_seed(0)
    model, other, inputs = Shared(), Shared(), torch.randn(5, 4, dtype=torch.float64)
    other.first.mean.fill_(3.0)
    plane, line = Plane(model, seed=0), Line(model, other)
    assert list(plane.directions[0]) == ["first.weight"]
    plane.move(0.5, -0.25)
    line.move(0.25)
    moved, between = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        moved.first.weight += 0.5 * plane.directions[0]["first.weight"] - 0.25 * plane.directions[1]["first.weight"]
        for own, end in zip(between.parameters(), other.parameters(), strict=True):
            own.lerp_(end, 0.25)
        between.first.mean.fill_(1.5)
    for path, expected in ((plane, moved), (line, between)):
        found = functional_call(model, path.weights, (inputs,), tie_weights=False)
        assert torch.allclose(found, expected(inputs), rtol=1e-12)


def test_a_parameter_of_no_elements_moves_nothing() -> None:
    model = network()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 4).double()))
    assert moved_parameters(model) == ["0.weight", "5.weight"]
    Plane(model, seed=0).move(0.5, 0.5)
    line = Line(model, copy.deepcopy(model))
    line.move(0.5)
    assert line.weights["empty"].shape == (0, 4)


def test_whole_numbers_have_no_line_between_them() -> None:
    ends = [network(), network()]
    for end, order in zip(ends, ([0, 1, 2], [2, 1, 0]), strict=True):
        end.register_buffer("order", torch.tensor(order))
        end[1].num_batches_tracked += order[0]
    with pytest.raises(UserError, match="other whole numbers in order"):
        Line(*ends)
    ends[1].order.copy_(ends[0].order)
    assert "order" not in Line(*ends).weights


def test_complex_weights_are_refused() -> None:
    model = network()
    check_real(model)
    model.register_parameter("filter", nn.Parameter(torch.ones(3, 3, dtype=torch.cdouble)))
    with pytest.raises(NotApplicable, match=r"complex weights \(filter\)"):
        check_real(model)
