"""What is counted is right; what is timed is there. No test asks for a speed."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from rich.console import Console
from torch import nn

import spatially
from spatially.data import Images
from spatially.errors import UserError
from spatially.probes import Cost
from spatially.probes.cost import timed
from spatially.probes.cost_figures import round_numbers
from spatially.report.study import report_study
from spatially.study import Study, run_study

QUICK = {"rounds": 3, "warm_up": 1, "batch": 4}


def subject_of(model: nn.Module, **options: object) -> spatially.Subject:
    return spatially.load(model, name="hand", input_size=16, device="cpu", **options)


def images_of(subject: spatially.Subject) -> Images:
    pixels = np.zeros((3, *subject.preprocessing.input_size, 3), np.uint8)
    return spatially.open_images(pixels, subject, labels=[0, 1, 0])


class Hand(nn.Module):
    """A convolution that keeps the size, a normalisation, a mean and a linear layer."""

    num_classes = 5

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.convolution(images)).mean(dim=(2, 3)))


def test_counts_and_memory_by_hand() -> None:
    subject = subject_of(Hand())
    result = Cost(**QUICK).run(subject, images_of(subject))
    assert result["parameters"] == 3 * 6 * 9 + 12 + 35
    assert result["macs"] == 16 * 16 * 6 * 27 + 30
    assert result["activations"] == 16 * 16 * 6 + 5
    # The convolution's output and the normalised one, of four images, are the most there is at once.
    assert result["peak_memory"].sel(step="inference", mode="eager") == pytest.approx(2 * 4 * 6 * 256 * 4, rel=0.02)
    assert result["batch_size"].values.tolist() == [[4]]


def test_throughput_comes_from_the_rounds() -> None:
    subject = subject_of(Hand())
    result = Cost(**QUICK, steps=["inference", "training"]).run(subject, images_of(subject))
    assert result["seconds"].shape == (2, 1, 3)
    assert (result["seconds"] > 0).all()
    np.testing.assert_allclose(result["throughput"], 4 / np.median(result["seconds"], axis=2))
    assert (result["throughput_low"] <= result["throughput"]).all()
    assert (result["throughput"] <= result["throughput_high"]).all()
    assert "thread" in result["seconds"].attrs["machine"]
    assert result["peak_memory"].sel(step="training") > result["peak_memory"].sel(step="inference")


def test_rounds_are_divided_by_their_calls() -> None:
    calls = []
    seconds = timed(lambda: calls.append(1), torch.device("cpu"), rounds=4, warm_up=2)
    assert len(seconds) == 4
    assert (seconds > 0).all()
    assert len(calls) > 2 + 4


def test_warm_up_then_rounds_of_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def clock(code: object, device: torch.device, *, calls: int) -> float:
        made.append(calls)
        return (0.04 if len(made) > 1 else 3.0) * calls  # the first pass is the slowest

    monkeypatch.setattr("spatially.probes.cost._seconds", clock)
    seconds = timed(lambda: None, torch.device("cpu"), rounds=4, warm_up=2)
    assert made == [1, 1, 3, 3, 3, 3]
    np.testing.assert_allclose(seconds, 0.04)


def test_batch_is_what_is_run() -> None:
    seen = set()

    class Recorder(Hand):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.add(len(images))
            return super().forward(images)

    subject = subject_of(Recorder())
    images = images_of(subject)
    seen.clear()
    result = Cost(batch=6, rounds=1, warm_up=1).run(subject, images)
    assert seen == {1, 6}  # one to count
    assert result["batch_size"] == 6
    assert Cost(rounds=1, warm_up=1).run(subject, images)["batch_size"] == 8


def test_the_model_is_as_it_was() -> None:
    subject = subject_of(Hand())
    before = copy.deepcopy(subject.model.state_dict())
    Cost(**QUICK, steps=["training"]).run(subject, images_of(subject))
    after = subject.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not subject.model.training
    assert all(one.grad is None and one.requires_grad for one in subject.model.parameters())


def test_half_precision_takes_less_memory() -> None:
    memory = [
        Cost(**QUICK).run(subject, images_of(subject))["peak_memory"].item()
        for dtype in ("float32", "bfloat16")
        for subject in [subject_of(nn.Sequential(nn.Conv2d(3, 64, 3), nn.AvgPool2d(14), nn.Flatten()), dtype=dtype)]
    ]
    assert memory[1] < 0.7 * memory[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": ["sleep"]}, "unknown step 'sleep'"),
        ({"modes": []}, "modes must name at least one of eager, compiled"),
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"batch": 1, "steps": "training"}, "batch must be a whole number of at least 2"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"warm_up": 1.5}, "warm_up must be a whole number"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Cost(**options)


def test_a_study_measures_once_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"pretrained": False, "num_classes": 12, "input_size": 32, "resize": 32}
    models = [{"model": "resnet10t", **small}, {"model": "resnet10t", "name": "other", "seed": 1, **small}]
    quick = {"rounds": 1, "warm_up": 1, "batch": 4}
    study = Study(models=models, data={"source": "shapes", "limit": 12}, probes={"cost": quick}, batch=8)
    run_study(study, tmp_path, device="cpu", console=Console(quiet=True))
    before = {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    monkeypatch.setattr(Cost, "measure", lambda *_, **__: pytest.fail("measured again"))
    store = run_study(study, tmp_path, device="cpu", console=Console(quiet=True))
    assert {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()} == before
    results = store.results()["cost"]
    assert "thread" in results["other"]["seconds"].attrs["machine"]
    drawing = Cost.drawing()
    table = drawing.tables(results)["cost"]
    assert table["model"].tolist() == ["resnet10t", "other"]
    assert table["images/s"].tolist() == [float(one["throughput"].item()) for one in results.values()]
    assert table["parameters_(M)"][0] == results["other"]["parameters"].item() / 1e6
    speed = drawing.figures(results)["inference"].axes[0]
    marks = {line.get_label(): line.get_xydata()[0].tolist() for line in speed.lines if line.get_label() in results}
    assert marks == {name: [one["macs"].item() / 1e9, one["throughput"].item()] for name, one in results.items()}
    assert "batches of 4" in drawing.captions(results)["inference"]
    assert "cost_inference" in report_study(tmp_path).read_text()


@pytest.mark.parametrize(("low", "high"), [(0.085, 0.16), (5.5, 12), (22, 26), (99, 101), (0.3, 4000), (1.0, 100.0)])
def test_an_axis_always_has_numbers_to_read_it_by(low: float, high: float) -> None:
    ticks = round_numbers(low, high)
    assert 3 <= len(ticks) <= 10
    assert all(low <= one <= high for one in ticks)


@pytest.mark.filterwarnings("error")
def test_models_without_parameters_are_drawn_all_the_same() -> None:
    subject = spatially.load("rigid_template", device="cpu")
    images = spatially.open_images("shapes", subject, limit=2)
    result = Cost(**QUICK).run(subject, images)
    scales = {axes.get_xscale() for axes in Cost.drawing().figures({"template": result})["inference"].axes}
    assert "linear" in scales


def test_one_piece_so_that_one_process_measures() -> None:
    subject = subject_of(Hand())
    assert len(Cost().chunks(images_of(subject), batch=1)) == 1


def test_a_model_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import Unsupported

    def refuse(images: torch.Tensor) -> torch.Tensor:
        raise Unsupported("a strange operation", "no way")

    monkeypatch.setattr(torch, "compile", lambda model: refuse)
    subject = subject_of(Hand())
    with pytest.raises(UserError, match=r"hand does not compile .*; leave compiled out of cost.modes"):
        Cost(**QUICK, modes=["compiled"]).run(subject, images_of(subject))


def test_a_batch_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is halved until it fits; the user's is an error."""

    class Large(Hand):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if len(images) > 3:
                raise torch.cuda.OutOfMemoryError("out of memory")
            return super().forward(images)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    subject = subject_of(Large())
    assert Cost(rounds=1, warm_up=1).run(subject, images_of(subject))["batch_size"] == 2
    with pytest.raises(UserError, match="a batch of 4 does not fit"):
        Cost(**QUICK).run(subject, images_of(subject))


@pytest.mark.slow
def test_compiled() -> None:
    subject = subject_of(Hand())
    result = Cost(**QUICK, modes=["eager", "compiled"], steps=["inference", "training"]).run(
        subject, images_of(subject)
    )
    assert (result["throughput"] > 0).all()
    assert np.isnan(result["peak_memory"].sel(mode="compiled")).all()
    figure = Cost.drawing().figures({"hand": result})["training"]
    assert "compiled" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2)])
def test_on_cuda(dtype: str, bytes_each: int) -> None:
    subject = spatially.load(Hand(), name="hand", input_size=64, device="cuda", dtype=dtype)
    result = Cost(rounds=2, steps=["inference", "training"]).run(subject, images_of(subject))
    assert (result["batch_size"] == 128).all()
    least = 2 * 128 * 6 * 64 * 64 * bytes_each  # what the convolution and the normalisation put out
    assert result["peak_memory"].sel(step="inference").item() >= least
    assert result["seconds"].attrs["machine"] == torch.cuda.get_device_name()


class Indexed(Hand):
    """With a table of whole numbers, which cannot learn."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.tensor([2, 1, 0]), requires_grad=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images[:, self.order])


@pytest.mark.parametrize(
    "make",
    [Indexed, lambda: nn.DataParallel(Hand()), lambda: torch.jit.trace(Hand().eval(), torch.zeros(2, 3, 16, 16))],
    ids=["whole numbers", "data parallel", "traced"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_models_of_other_kinds(make: Callable[[], nn.Module]) -> None:
    subject = subject_of(make(), num_classes=5)
    result = Cost(**QUICK, steps=["inference", "training"]).run(subject, images_of(subject))
    assert result["macs"] == 16 * 16 * 6 * 27 + 30
    assert result["activations"] == 16 * 16 * 6 + 5
    assert (result["throughput"] > 0).all()


def test_a_model_that_cannot_learn_has_no_training_step() -> None:
    class Still(Hand):
        @torch.no_grad()
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images)

    subject = subject_of(Still())
    with pytest.raises(UserError, match=r"hand is not differentiable; leave training out of cost\.steps"):
        Cost(**QUICK, steps=["training"]).run(subject, images_of(subject))


def test_quartiles_over_rounds_by_hand() -> None:
    seconds = (("step", "mode", "round"), np.array([[[1.0, 2.0, 3.0, 4.0, 9.0]]]))
    outcomes = xr.Dataset({"seconds": seconds}, coords={"batch_size": (("step", "mode"), [[6]])})
    result = Cost().summarise(outcomes, chance=0.5)
    found = [float(result[f"throughput{end}"].item()) for end in ("_low", "", "_high")]
    assert found == [6 / 4, 6 / 3, 6 / 2]


def test_a_training_step_goes_forward_in_training_mode_and_back() -> None:
    modes: list[bool] = []
    back: list[int] = []

    class Recorder(Hand):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            output = super().forward(images)
            if output.requires_grad:
                modes.append(self.training)
                output.register_hook(lambda gradient: back.append(len(gradient)))
            return output

    subject = subject_of(Recorder())
    Cost(**QUICK, steps=["training"]).run(subject, images_of(subject))
    assert len(modes) > 4
    assert all(modes)
    assert back == [4] * len(modes)


class Attentive(nn.Module):
    """Tokens of 4×4 pixels, one attention of two heads, a head; with a look at the values it cannot run without any."""

    num_classes = 5

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.stem, self.head, self.looks = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 5), looks

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(images).flatten(2).unflatten(1, (2, 4)).transpose(2, 3).contiguous()
        if self.looks and float(tokens.detach().sum()) == torch.inf:
            raise ValueError
        mixed = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        return self.head(mixed.transpose(2, 3).flatten(1, 2).mean(2))


@pytest.mark.parametrize("looks", [False, True])
def test_attention_counts_as_two_products(looks: bool) -> None:
    subject = subject_of(Attentive(looks=looks))
    result = Cost(**QUICK).run(subject, images_of(subject))
    assert result["macs"] == 16 * 8 * 48 + 2 * (2 * 16 * 16 * 4) + 40
    assert result["activations"] == 16 * 8 + 2 * 16 * 16 + 2 * 16 * 4 + 5


def test_memory_that_was_given_back_does_not_count() -> None:
    """Ten layers in a row hold two maps at a time, and ten of them while gradients will be wanted."""
    layers = [nn.Conv2d(3, 3, 1, bias=False) for _ in range(10)]
    subject = subject_of(nn.Sequential(*layers, nn.AvgPool2d(16), nn.Flatten()))
    result = Cost(**QUICK, steps=["inference", "training"]).run(subject, images_of(subject))
    inference, training = result["peak_memory"].squeeze("mode").values / (4 * 3 * 256 * 4)
    assert inference == pytest.approx(2, rel=0.01)
    assert 10 < training < 13.5
