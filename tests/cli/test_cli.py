"""The command line as a user meets it: what works, and every mistake in one line with exit code 2."""

import json
import shlex
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from PIL import Image
from xarray import load_dataset

from spatially.cli import main
from spatially.cli.options import settings


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return run


MODEL = [
    "resnet10t",
    "--no-pretrained",
    "--num-classes",
    "12",
    "--input-size",
    "32",
    "--resize",
    "32",
    "--device",
    "cpu",
]
SMALL = ["--data", "shapes", "--limit", "24", "--blocks", "8", "--ratios", "0,1", "--batch", "12"]


def test_probe_then_report(run: Callable, tmp_path: Path) -> None:
    code, out, _ = run(
        "probe", *MODEL, *SMALL, "--probes", "sensitivity,paste", "--set", "paste.block=8", "--out", tmp_path
    )
    assert code == 0
    assert "Structure reliance" in out
    result = load_dataset(tmp_path / "results" / "resnet10t.sensitivity.nc", engine="h5netcdf")
    assert result.sizes == {"image": 24, "kind": 2, "block": 1, "ratio": 2}
    assert result.attrs["command"].startswith("spatially probe resnet10t --data shapes")
    code, out, _ = run("report", tmp_path)
    assert code == 0
    assert (tmp_path / "report.html").stat().st_size > 50_000
    for ending in ("svg", "pdf", "png"):
        assert (tmp_path / "figures" / f"sensitivity_shuffle.{ending}").exists()
    assert (tmp_path / "tables" / "sensitivity_accuracy.csv").exists()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("sensitivity.blocks=8,16", [8, 16]),
        ("sensitivity.blocks=[8, 16]", [8, 16]),
        ("sensitivity.ratios=0, .5,1", [0, 0.5, 1]),
        ("robustness.epsilons=1/255,4/255", ["1/255", "4/255"]),
        ("interpolation.towards=a,b.pth", "a,b.pth"),
    ],
)
def test_brackets_may_be_forgotten_around_numbers(word: str, value: object) -> None:
    probe, _, option = word.partition("=")[0].partition(".")
    assert settings([word]) == {probe: {option: value}}


def test_what_the_table_does_not_say_stands_below_it(run: Callable, tmp_path: Path) -> None:
    for number in range(12):  # all alike, so that one is right by chance
        folder = tmp_path / "images" / f"class_{number:02}"
        folder.mkdir(parents=True)
        Image.new("RGB", (64, 64), "grey").save(folder / "one.png")
    images = tmp_path / "images"
    words = [
        "demo/vit",
        "--data",
        images,
        "--device",
        "cpu",
        "--blocks",
        "24",
        "--ratios",
        "0,1",
        "--out",
        tmp_path / "o",
    ]
    code, out, plan = run("probe", *words)
    told = " ".join(out.split())
    assert code == 0
    assert "demo/vit has other names for its 12 classes than the data" in " ".join(plan.split())
    assert "24×24 blocks cover 56 % of the image; the rest stays as it is." in told
    assert "demo/vit undefined: its accuracy on clean images (8 %) is not above chance" in told


def test_preprocessing_from_the_command_line_reaches_the_result(run: Callable, tmp_path: Path) -> None:
    words = ["--mean", "0.1,0.2,0.3", "--std", "1,2,4", "--interpolation", "nearest", "--crop-mode", "squash"]
    code, _, _ = run("probe", *MODEL, *SMALL, *words, "--dtype", "float64", "--out", tmp_path)
    assert code == 0
    facts = load_dataset(tmp_path / "results" / "resnet10t.sensitivity.nc", engine="h5netcdf").attrs
    preprocessing = json.loads(facts["preprocessing"])
    assert (preprocessing["mean"], preprocessing["std"]) == ([0.1, 0.2, 0.3], [1, 2, 4])
    assert (preprocessing["interpolation"], preprocessing["crop_mode"]) == ("nearest", "squash")
    assert facts["dtype"] == "float64"


def test_the_command_in_a_result_repeats_it(run: Callable, tmp_path: Path) -> None:
    run("probe", *MODEL, *SMALL, "--out", tmp_path / "a", "--seed", 3)
    path = Path("results") / "resnet10t.sensitivity.nc"
    command = load_dataset(tmp_path / "a" / path, engine="h5netcdf").attrs["command"]
    words = shlex.split(command.replace("runs/again", str(tmp_path / "b")))
    code, _, _ = run(*words[1:], "--device", "cpu")
    assert code == 0
    assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()


def test_all_probes_that_apply_and_what_was_skipped(run: Callable, tmp_path: Path) -> None:
    words = [*MODEL, "--data", "shapes", "--limit", "8", "--blocks", "8", "--ratios", "0,1", "--batch", "8"]
    words += ["--probes", "all", "--set", "paste.block=8"]
    for small in ("landscape.points=2", "cost.rounds=1", "cost.batch=2"):
        words += ["--set", small]
    code, _, said = run("probe", *words, "--out", tmp_path / "a")
    assert code == 0
    assert "skipped position_bias of resnet10t: resnet10t has no position embedding and no position bias" in " ".join(
        said.split()
    )
    assert "skipped hessian: long to measure; to have it too: --probes all,hessian" in " ".join(said.split())
    found = {path.name.split(".")[1] for path in (tmp_path / "a" / "results").iterdir()}
    assert found >= {"sensitivity", "paste", "receptive_field", "fourier", "variance", "landscape"}
    assert not found & {"position_bias", "hessian"}
    facts = load_dataset(tmp_path / "a" / "results" / "resnet10t.paste.nc", engine="h5netcdf").attrs
    assert "--probes all,paste,sensitivity" in facts["command"] or "--probes all,sensitivity,paste" in facts["command"]
    assert json.loads(facts["options"])["block"] == 8
    alone = ["--data", "shapes", "--limit", "8", "--probes", "position_bias", "--out", tmp_path / "b"]
    code, _, said = run("probe", *MODEL, *alone)
    assert code == 2
    assert "resnet10t has no position embedding" in " ".join(said.split())


def test_study_from_a_file(run: Callable, tmp_path: Path) -> None:
    run("probe", *MODEL, *SMALL, "--out", tmp_path / "a")
    code, _, _ = run("probe", "--study", tmp_path / "a" / "study.yaml", "--device", "cpu", "--out", tmp_path / "b")
    assert code == 0
    contents = [(tmp_path / name / "results" / "resnet10t.sensitivity.nc").read_bytes() for name in "ab"]
    assert contents[0] == contents[1]


def test_folder_with_a_broken_image(run: Callable, make_folder: Callable[..., Path], tmp_path: Path) -> None:
    root = make_folder(classes=3, each=4)
    (root / "class1" / "0.png").write_text("not an image")
    words = ["probe", "resnet10t", "--no-pretrained", "--num-classes", "3", "--input-size", "32", "--device", "cpu"]
    words += ["--data", root, "--blocks", "8", "--ratios", "0,1", "--out", tmp_path / "out"]
    code, _, err = run(*words, "--strict")
    assert code == 2
    assert "class1/0.png cannot be read: not an image" in " ".join(err.split())
    code, _, _ = run(*words)
    assert code == 0
    result = load_dataset(tmp_path / "out" / "results" / "resnet10t.sensitivity.nc", engine="h5netcdf")
    assert result.attrs["skipped"] == 1
    assert "class1/0.png" in result.attrs["skipped_names"]


@pytest.mark.parametrize("image", ["shapes:7", "file"])
def test_look(image: str, run: Callable, tmp_path: Path) -> None:
    if image == "file":
        Image.effect_noise((80, 60), 50).save(tmp_path / "a.png")
        image = str(tmp_path / "a.png")
    models = "bag_of_patches,rigid_template"
    code, out, _ = run(
        "look", image, "--models", models, "--block", 8, "--out", tmp_path / "look.png", "--device", "cpu"
    )
    assert code == 0
    assert "rigid_template" in out
    assert "probability of the class" in out
    assert Image.open(tmp_path / "look.png").width > 800


def test_models_and_probes(run: Callable) -> None:
    code, out, _ = run("models")
    assert code == 0
    assert "bag_of_patches" in out
    code, out, _ = run("models", "torchvision/resnet1*")
    assert "torchvision/resnet18" in out
    code, out, _ = run("probes")
    assert code == 0
    assert "sensitivity" in out
    assert "paste" in out
    assert "epsilons = [0.00392]" in " ".join(out.split())


def test_anatomy(run: Callable) -> None:
    code, out, _ = run("anatomy", *MODEL)
    assert code == 0
    assert "residual stream for images of 32×32" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["1", "layer1.0", "convolution", "8×8", "64", "nchw"] in lines
    assert ["2", "layer2.0", "subsampling", "4×4", "128", "nchw"] in lines
    assert "5 points: 1 stem, 1 convolution, 3 subsampling" in out
    code, out, _ = run("anatomy", "pit_tiny", "--no-pretrained", "--input-size", "64x96", "--device", "cpu")
    assert code == 0
    assert "7×11 + 1" in out


def test_spectra_and_variance_in_a_study_and_on_the_page(run: Callable, tmp_path: Path) -> None:
    words = ["probe", *MODEL, "--data", "shapes", "--limit", "24", "--batch", "10", "--probes", "fourier,variance"]
    code, _, _ = run(*words, "--out", tmp_path / "a")
    assert code == 0
    spectra = load_dataset(tmp_path / "a" / "results" / "resnet10t.fourier.nc", engine="h5netcdf")
    assert spectra.sizes["image"] == 24
    assert spectra["name"].values.tolist() == ["maxpool", "layer1.0", "layer2.0", "layer3.0", "layer4.0"]
    code, _, _ = run("report", tmp_path / "a")
    assert code == 0
    assert (tmp_path / "a" / "figures" / "fourier_spectra.svg").exists()
    assert (tmp_path / "a" / "figures" / "variance_depth.svg").exists()
    assert "Park" in (tmp_path / "a" / "report.html").read_text()


class Malicious:
    """A pickle that would run code when opened."""

    def __reduce__(self) -> tuple:
        return (open, ("/nonexistent/spatially", "w"))


def bad_files(folder: Path) -> None:
    torch.save({"weights": Malicious()}, folder / "evil.pth")
    (folder / "empty").mkdir()
    (folder / "note.png").write_text("text")
    (folder / "broken").mkdir()
    (folder / "broken" / "results").mkdir()
    (folder / "broken" / "results" / "a.sensitivity.nc").write_bytes(b"\x89HDF cut short")


MISTAKES = {
    "missing folder": ("probe {model} --data {tmp}/none --out {tmp}/o", "there is no folder"),
    "empty folder": ("probe {model} --data {tmp}/empty --out {tmp}/o", "holds no images"),
    "unknown model": ("probe resnet50x --data shapes --out {tmp}/o", "did you mean 'resnet50'"),
    "unknown torchvision model": ("probe torchvision/resnet17 --data shapes --out {tmp}/o", "did you mean"),
    "unknown probe": ("probe {model} --data shapes --probes sensitivty --out {tmp}/o", "did you mean 'sensitivity'"),
    "block too large": ("probe {model} --data shapes --blocks 64 --out {tmp}/o", "does not fit into an image of 32×32"),
    "block zero": ("probe {model} --data shapes --blocks 0 --out {tmp}/o", "block must be"),
    "block negative": ("probe {model} --data shapes --blocks=-8 --out {tmp}/o", "block must be"),
    "block no number": ("probe {model} --data shapes --blocks eight --out {tmp}/o", "numbers separated by commas"),
    "ratio": ("probe {model} --data shapes --ratios 0,1.5 --out {tmp}/o", "ratio must lie in 0..1"),
    "size": (
        "probe resnet10t --input-size 32x --data shapes --out {tmp}/o",
        "takes SIDE or HEIGHTxWIDTH, but came as '32x'",
    ),
    "kind": ("probe {model} --data shapes --kinds shufle --out {tmp}/o", "did you mean 'shuffle'"),
    "malicious pickle": ("probe {model} --data shapes --checkpoint {tmp}/evil.pth --out {tmp}/o", "run code"),
    "missing checkpoint": ("probe {model} --data shapes --checkpoint {tmp}/no.pth --out {tmp}/o", "no.pth"),
    "unknown option": ("probe {model} --data shapes --blok 8 --out {tmp}/o", "--block"),
    "unknown command": ("prob", "probe"),
    "no data": ("probe resnet18 --out {tmp}/o", "--data"),
    "study and more": ("probe --study a.yaml --limit 5 --blocks 8 --out {tmp}/o", "put limit, blocks into the file"),
    "study and models": ("probe resnet18 --study a.yaml --out {tmp}/o", "put models into the file"),
    "set without dot": ("probe {model} --data shapes --set block=8 --out {tmp}/o", "PROBE.OPTION=VALUE"),
    "set unknown": ("probe {model} --data shapes --set sensitivity.block=8 --out {tmp}/o", "did you mean 'blocks'"),
    "option of another probe": (
        "probe {model} --data shapes --probes paste --blocks 8 --out {tmp}/o",
        "belongs to the probe",
    ),
    "device": ("probe resnet18 --no-pretrained --data shapes --device warp --out {tmp}/o", "device"),
    "report of nothing": ("report {tmp}/empty", "holds no results"),
    "damaged results": ("report {tmp}/broken", "damaged or was cut short"),
    "look at text": ("look {tmp}/note.png --models bag_of_patches", "not an image"),
    "look at nothing": ("look {tmp}/none.png --models bag_of_patches", "there is no image"),
    "look's ending": ("look shapes:1 --models bag_of_patches --out a.gif", ".png, .pdf or .svg"),
    "anatomy of what has none": ("anatomy vgg11 --no-pretrained --input-size 32 --device cpu", "no residual stream"),
    "models' pattern": ("models swim_tiny", "did you mean"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_two(case: str, run: Callable, tmp_path: Path) -> None:
    bad_files(tmp_path)
    line, expected = MISTAKES[case]
    code, _, err = run(*line.format(tmp=tmp_path, model=" ".join(MODEL)).split())
    assert code == 2, err
    assert expected in " ".join(err.split())
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "o").exists()


def test_a_warning_is_one_line_without_the_code_that_gave_it(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    said, before = [], warnings.formatwarning

    def command(**_: object) -> None:
        said.append(warnings.formatwarning("a.png cannot be\nread", UserWarning, "code.py", 3))

    import_module("spatially.cli.commands")  # which register with the true one
    monkeypatch.setattr("spatially.cli.app", command)
    run("--version")
    assert said == ["warning: a.png cannot be read\n"]
    assert warnings.formatwarning is before


def test_full_disk_is_one_line(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, _, err = run("probe", *MODEL, *SMALL, "--out", tmp_path / "o")
    assert code == 1
    assert "No space left on device; free some space there and run the same command again" in " ".join(err.split())
    assert not list((tmp_path / "o").rglob("*.nc"))
    assert not list((tmp_path / "o").rglob("*.draft"))


def test_demo_calibrates_the_ruler(run: Callable, tmp_path: Path) -> None:
    code, _, _ = run(
        "demo",
        "--models",
        "calibrators",
        "--probes",
        "sensitivity,paste",
        "--out",
        tmp_path,
        "--limit",
        240,
        "--device",
        "cpu",
    )
    assert code == 0
    assert (tmp_path / "report.html").exists()
    bag = load_dataset(tmp_path / "results" / "bag_of_patches.sensitivity.nc", engine="h5netcdf")
    template = load_dataset(tmp_path / "results" / "rigid_template.sensitivity.nc", engine="h5netcdf")
    own = bag.sel(kind="shuffle", block=8)
    assert (own.prediction == own.prediction.sel(ratio=0)).all()
    assert own.structure_reliance == 0
    assert template.structure_reliance.sel(block=8) > 0.9
    closed_form = bag.attrs["bag_accuracy"]
    assert own.accuracy_low.sel(ratio=0) <= closed_form <= own.accuracy_high.sel(ratio=0)


def test_demo_runs_every_probe_on_calibrators_and_trained_models(run: Callable, tmp_path: Path) -> None:
    """Those of every kind: whole numbers for weights, centred fields, a plain convolutional network."""
    models = "bag_of_patches,rigid_template,demo/swin_m,demo/cnn"
    code, said, _ = run("demo", "--models", models, "--limit", 24, "--out", tmp_path, "--device", "cpu")
    assert code == 0
    found: dict[str, set[str]] = {}
    for path in (tmp_path / "results").glob("*.nc"):
        model, probe, _ = path.name.split(".")
        found.setdefault(model, set()).add(probe)
    behaviour = {"sensitivity", "paste", "frequency_noise", "cost"}
    inside = {"fourier", "variance", "receptive_field", "interaction_ratio", "robustness", "hessian", "landscape"}
    assert found == {
        "bag_of_patches": behaviour,
        "rigid_template": {*behaviour, "receptive_field", "robustness"},
        "demo_swin_m": behaviour | inside,
        "demo_cnn": behaviour | inside,
    }
    lines = [line for line in said.splitlines() if line.strip("│ ").startswith("demo/swin_m")]
    assert "100.0%" in lines[-1]
    page = (tmp_path / "report.html").read_text()
    sections = ["sensitivity", "paste", "fourier", "variance", "receptive_field", "interaction_ratio", "cost"]
    places = [page.index(f'id="{name}"') for name in sections]
    assert places == sorted(places)
