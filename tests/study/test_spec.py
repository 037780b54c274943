"""A study from YAML or from a command line, with every mistake named."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from spatially.errors import UserError
from spatially.probes import PROBES, Robustness
from spatially.study.spec import Study, make_study, read_study

YAML = """
models: [resnet18, {model: swin_tiny_patch4_window7_224, pretrained: false}]
data: {source: shapes, limit: 10}
probes: {sensitivity: {blocks: [8, 16]}, paste: }
batch: 8
"""


def test_yaml_and_python_agree(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(YAML)
    assert read_study(path) == Study(
        models=[{"model": "resnet18"}, {"model": "swin_tiny_patch4_window7_224", "pretrained": False}],
        data={"source": "shapes", "limit": 10},
        probes={"sensitivity": {"blocks": [8, 16]}, "paste": {}},
        batch=8,
    )


def test_numbers_of_numpy_and_paths_are_written_as_plain_data(tmp_path: Path) -> None:
    given = Study(
        models=[{"model": "resnet18", "checkpoint": Path("weights.pt"), "pretrained": False}],
        data={"source": Path("images"), "limit": np.int64(10)},
        probes={"robustness": {"occlusion": np.int64(5), "epsilons": np.array([0.25])}},
        batch=np.int64(8),
    )
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(given.describe(), sort_keys=False))
    assert read_study(path).make_probes() == given.make_probes() == [Robustness(occlusion=5, epsilons=(0.25,))]
    assert read_study(path).command() == given.command()
    assert "--checkpoint weights.pt" in given.command()
    assert "--limit 10" in given.command()


def test_names_are_enough() -> None:
    study = make_study(models="resnet18", data="shapes", probes=["paste"])
    assert study.models == [{"model": "resnet18"}]
    assert study.probes == {"paste": {}}


def test_command_names_everything_that_decides_the_result() -> None:
    study = make_study(
        models=[{"model": "a", "pretrained": False}, {"model": "b", "pretrained": False}],
        data={"source": "my images", "limit": 9, "workers": 3},
        probes={"sensitivity": {"blocks": [8]}},
        batch=16,
    )
    assert study.command() == (
        "spatially probe a b --data 'my images' --probes sensitivity --batch 16 --limit 9 --no-pretrained "
        "--set 'sensitivity.blocks=[8]' --out runs/again"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [a]\ndata: shapes\nprobs: {}", "did you mean 'probes'"),
        ("models: [a]", "lacks 'data'"),
        ("data: shapes", "lacks 'models'"),
        ("models: []\ndata: shapes", "at least one model"),
        ("models: [{name: x}]\ndata: shapes", "model: NAME"),
        ("models: [{model: a, pretraind: true}]\ndata: shapes", "did you mean 'pretrained'"),
        ("models: [a]\ndata: {source: shapes, limits: 3}", "did you mean 'limit'"),
        ("models: [a]\ndata: {limit: 3}", "needs a source"),
        ("models: [a]\ndata: shapes\nprobes: {sensitivty: }", "did you mean 'sensitivity'"),
        ("models: [a]\ndata: shapes\nprobes: {sensitivity: {block: [8]}}", "did you mean 'blocks'"),
        ("models: [a]\ndata: shapes\nprobes: {sensitivity: {blocks: [0]}}", "block must be"),
        ("models: [a]\ndata: shapes\nbatch: 0", "batch must be"),
        ("models: [a\ndata", "is not YAML"),
        ("- a\n- b", "must hold models"),
    ],
)
def test_mistakes_are_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        read_study(path)
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no study"):
        read_study(tmp_path / "none.yaml")


def test_all_probes_with_options_for_one() -> None:
    study = make_study(models="a", data="shapes", probes={"all": {"seed": 3}, "paste": {"block": 8}})
    made = {probe.name: probe for probe in study.make_probes()}
    assert list(made) == [name for name in PROBES if name not in study.left_out]
    assert {probe.seed for probe in made.values()} == {3}
    assert made["paste"].options()["block"] == 8
    assert "--probes all,paste" in study.command()
    assert make_study(models="a", data="shapes", probes="all").everything
    with pytest.raises(UserError, match="unknown option of all 'block'"):
        make_study(models="a", data="shapes", probes={"all": {"block": 8}})


def test_lengthy_probes_are_named_beside_all() -> None:
    study = make_study(models="a", data="shapes", probes="all")
    assert study.left_out == ["hessian", "landscape"]
    assert {probe.name for probe in study.make_probes()} == set(PROBES) - {"hessian", "landscape"}
    study = make_study(models="a", data="shapes", probes={"all": {"seed": 3}, "Landscape": {}})
    assert study.left_out == ["hessian"]
    assert {probe.name: probe.seed for probe in study.make_probes()}["landscape"] == 3
    alone = make_study(models="a", data="shapes", probes=["hessian"])
    assert (alone.left_out, [probe.name for probe in alone.make_probes()]) == ([], ["hessian"])
