"""A study from YAML or from a command line, with every mistake named."""

from pathlib import Path

import pytest

from spatially.errors import UserError
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
