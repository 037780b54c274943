"""Recipes: what the papers say is what they hold, and every mistake in one is told."""

import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from spatially.errors import UserError
from spatially.models import PAPERS
from spatially.train.library import as_yaml, head_comment, parse_setting, read_recipe, recipe_names
from spatially.train.recipe import Recipe

# By hand from the definitions: rate at the recipe's own batch, and every value that a paper gives.
DEIT_AUGMENTATION = {
    "augmentation.crop": "resized",
    "augmentation.rand_augment": "rand-m9-mstd0.5-inc1",
    "augmentation.erase": 0.25,
    "augmentation.mixup": 0.8,
    "augmentation.cutmix": 1.0,
    "augmentation.flip": 0.5,
    "augmentation.repeats": 1,
    "regularisation.smoothing": 0.1,
}
HEO = {
    "optimiser.name": "adamp",
    "optimiser.lr": 5e-4,
    "optimiser.lr_per": 512,
    "optimiser.weight_decay": 0.05,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 5,
    "regularisation.clip": None,
    "regularisation.ema": None,
}
PLAIN = {
    "augmentation.crop": "resized",
    "augmentation.flip": 0.5,
    "augmentation.rand_augment": None,
    "augmentation.jitter": 0.0,
    "augmentation.erase": 0.0,
    "augmentation.mixup": 0.0,
    "regularisation.smoothing": 0.0,
    "regularisation.drop_path": 0.0,
}
TABLE: dict[str, tuple[float, dict[str, Any]]] = {
    "xu-1h": (
        0.01,
        {
            **PLAIN,
            "augmentation.cutmix": 0.0,
            "epochs": 60,
            "batch": 256,
            "optimiser.name": "sgd",
            "optimiser.momentum": 0.9,
            "optimiser.nesterov": False,
            "optimiser.weight_decay": 1e-4,
            "schedule.name": "step",
            "schedule.milestones": [40, 50],
            "schedule.factor": 0.1,
            "schedule.warmup_epochs": 0,
        },
    ),
    "swin": (
        1e-3,
        {
            **DEIT_AUGMENTATION,
            "augmentation.jitter": 0.4,
            "epochs": 300,
            "batch": 1024,
            "optimiser.name": "adamw",
            "optimiser.lr": 5e-4,
            "optimiser.lr_per": 512,
            "optimiser.weight_decay": 0.05,
            "schedule.name": "cosine",
            "schedule.warmup_epochs": 20,
            "regularisation.clip": 5.0,
            "regularisation.drop_path": 0.2,
        },
    ),
    "vanilla": (1e-3, {**HEO, **PLAIN, "augmentation.cutmix": 0.0, "epochs": 100}),
    "cutmix": (1e-3, {**HEO, **PLAIN, "augmentation.cutmix": 1.0, "epochs": 100}),
    "deit": (
        1e-3,
        {
            **HEO,
            **DEIT_AUGMENTATION,
            "epochs": 300,
            "augmentation.jitter": 0.3,
            "regularisation.drop_path": 0.1,
            "distillation": None,
        },
    ),
    "distill": (
        1e-3,
        {
            **HEO,
            **DEIT_AUGMENTATION,
            "epochs": 300,
            "augmentation.jitter": 0.3,
            "regularisation.drop_path": 0.1,
            "distillation.teacher": "regnety_160.deit_in1k",
            "distillation.kind": "hard",
            "distillation.alpha": 0.5,
        },
    ),
    "kim-finetune": (
        0.01,
        {
            "epochs": 200,
            "batch": 64,
            "optimiser.name": "sgd",
            "optimiser.weight_decay": 5e-4,
            "schedule.name": "cosine",
            "data.split": [0.7, 0.15, 0.15],
            "initialisation.pretrained": True,
            "initialisation.head": "reset",
            "initialisation.positions": "reset",
        },
    ),
    "park-cifar": (
        1.25e-4,
        {
            "epochs": 300,
            "batch": 96,
            "optimiser.name": "adamw",
            "optimiser.weight_decay": 0.05,
            "schedule.warmup_epochs": 5,
            "schedule.warmup_before": True,
            "augmentation.rand_augment": "rand-m9-n2-mstd1.0",
            "augmentation.mixup": 1.0,
            "augmentation.cutmix": 0.8,
            "regularisation.smoothing": 0.1,
            "regularisation.drop_path": 0.1,
            "regularisation.clip": 5.0,
            "model.input_size": 32,
            "model.patch_size": 2,
        },
    ),
}


def value(recipe: Recipe, key: str) -> Any:
    found: Any = recipe.describe()
    for step in key.split("."):
        found = found[step]
    return found


def small(**changes: Any) -> Recipe:
    return Recipe(**{"name": "small", "epochs": 4, "batch": 8, "optimiser": {"name": "sgd", "lr": 0.1}, **changes})


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_holds_what_its_paper_says(name: str) -> None:
    rate, values = TABLE[name]
    recipe = read_recipe(name)
    assert recipe.learning_rate == pytest.approx(rate, rel=1e-12)
    assert {key: value(recipe, key) for key in values} == values
    assert recipe.name == name
    assert recipe.paper in PAPERS


def test_every_recipe_is_listed_in_the_table_but_the_demo() -> None:
    assert set(recipe_names()) == {*TABLE, "demo"}


@pytest.mark.parametrize("name", recipe_names())
def test_the_head_says_what_a_reader_asks(name: str) -> None:
    head = head_comment(name)
    assert head.startswith(f"{name}: ")
    for word in ("Paper:", "Command:", "Takes:", "Expect:"):
        assert word in head
    assert f"--recipe {name}" in head or name == "demo"
    if read_recipe(name).paper == "xu":  # whose models have convolutional keys
        assert read_recipe(name).model.qk_norm is None
        assert "model.qk_norm=false for its plain form" in head


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_written_in_full_is_read_back_the_same(name: str, tmp_path: Path) -> None:
    recipe = read_recipe(name)
    path = tmp_path / f"{name}.yaml"
    path.write_text(as_yaml(recipe))
    assert read_recipe(path) == recipe


def test_a_rate_goes_with_the_batch_where_the_paper_scales_it() -> None:
    assert read_recipe("deit").override({"batch": 256}).learning_rate == pytest.approx(5e-4 * 256 / 512)
    assert read_recipe("xu-1h").override({"batch": 64}).learning_rate == 0.01
    resolved = read_recipe("deit").resolve(batch=2048)
    assert (resolved.optimiser.lr, resolved.optimiser.lr_per, resolved.batch) == (pytest.approx(2e-3), None, 2048)
    assert resolved.learning_rate == pytest.approx(2e-3)
    assert replace(resolved, batch=8).learning_rate == pytest.approx(2e-3)


def test_warm_up_before_the_epochs_adds_to_them() -> None:
    assert read_recipe("park-cifar").total_epochs == 305
    assert read_recipe("swin").total_epochs == 300


@pytest.mark.parametrize(
    ("name", "epochs", "warmup", "milestones"),
    [("swin", 30, 2, ()), ("deit", 2, 1, ()), ("xu-1h", 6, 0, (4, 5)), ("xu-1h", 2, 0, (1,)), ("xu-1h", 1, 0, ())],
)
def test_fewer_epochs_keep_the_schedule_in_proportion(
    name: str, epochs: int, warmup: int, milestones: tuple[int, ...]
) -> None:
    recipe = read_recipe(name).within(epochs)
    assert (recipe.epochs, recipe.schedule.warmup_epochs, recipe.schedule.milestones) == (epochs, warmup, milestones)
    assert read_recipe(name).within(read_recipe(name).epochs) == read_recipe(name)


def test_values_are_changed_by_their_keys_and_nothing_else_is() -> None:
    before = read_recipe("deit")
    after = before.override(
        {"optimiser.lr": "1e-3", "schedule.warmup_epochs": 2, "distillation.teacher": "resnet50", "batch": 64}
    )
    assert after.optimiser.lr == 1e-3
    assert after.schedule.warmup_epochs == 2
    assert after.batch == 64
    assert after.distillation is not None
    assert after.distillation.teacher == "resnet50"
    undone = after.override(
        {"optimiser.lr": 5e-4, "schedule.warmup_epochs": 5, "distillation": None, "batch": before.batch}
    )
    assert undone == before


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"optimser": {}}, "unknown key 'optimser': did you mean 'optimiser'?"),
    ({"optimiser.lrr": 1}, "unknown key of optimiser 'lrr': did you mean 'lr'"),
    ({"sheduler.name": "cosine"}, "unknown key 'sheduler.name': did you mean 'schedule.name'"),
    ({"optimiser": 3}, "optimiser must be given as key: value, but came as 3"),
    ({"optimiser": {"name": "sgd"}}, "optimiser lacks lr"),
    ({"optimiser.lr": "fast"}, "optimiser.lr must be a number above 0, but came as 'fast'"),
    ({"optimiser.lr": 0}, "optimiser.lr must be a number above 0, but came as 0"),
    ({"optimiser.lr": float("nan")}, "optimiser.lr must be a number above 0"),
    ({"optimiser.name": "adam"}, "optimiser.name must be one of sgd, adamw, adamp, but came as 'adam'"),
    ({"optimiser.betas": [0.9]}, "optimiser.betas must be a list of 2, but came as [0.9]"),
    ({"epochs": 2.5}, "epochs must be a whole number at least 1, but came as 2.5"),
    ({"epochs": True}, "epochs must be a whole number at least 1, but came as True"),
    ({"batch": 0}, "batch must be a whole number at least 1, but came as 0"),
    ({"run.compile": "yes"}, "run.compile must be true or false, but came as 'yes'"),
    ({"run.precision": "half"}, "run.precision must be one of auto, bf16, fp16, fp32, fp64"),
    ({"run.accumulation": 3}, "run.accumulation must divide the batch of 8, but came as 3"),
    ({"optimiser.betas": [1, 1]}, "optimiser.betas must be a number at least 0 and below 1, but came as 1"),
    ({"optimiser.nesterov": True, "optimiser.momentum": 0}, "optimiser.nesterov needs an optimiser.momentum above 0"),
    ({"run.seed": 2**63}, "run.seed must be a whole number at least 0 and at most 9223372036854775807, but came as"),
    ({"optimiser.lr": 10**400}, "optimiser.lr must be a number above 0"),
    ({"regularisation.smoothing": 1.5}, "regularisation.smoothing must be a number at least 0 and at most 0.999"),
    ({"augmentation.scale": [0.5, 0.2]}, "augmentation.scale must rise"),
    ({"augmentation.rand_augment": "augmix"}, "augmentation.rand_augment must be timm's name for one"),
    ({"augmentation.rand_augment": "rand-m9-foo3"}, "augmentation.rand_augment: 'foo3' of 'rand-m9-foo3' is not known"),
    ({"lr": 0.1}, "unknown key 'lr': did you mean 'optimiser.lr'?"),
    ({"mixup": 0.1}, "unknown key 'mixup': did you mean 'augmentation.mixup'?"),
    ({"pretrained": True}, "unknown key 'pretrained': did you mean 'distillation.pretrained' or 'initialisation.pret"),
    ({"warmup_epochs": 1}, "unknown key 'warmup_epochs': did you mean 'schedule.warmup_epochs'?"),
    ({"qqq": 1}, "unknown key 'qqq': choose from name, paper, epochs, batch, optimiser, "),
    ({"qqq.www": 1}, "unknown key 'qqq.www': choose from name, paper, epochs, batch, optimiser, "),
    ({"augmentation.qqq": 1}, "unknown key of augmentation 'qqq': choose from crop, scale, ratio, "),
    ({"augmentation.crop": "middle"}, "augmentation.crop must be one of resized, padded, none"),
    ({"schedule.name": "step"}, "schedule.milestones must name at least one epoch"),
    ({"schedule.milestones": [2]}, "schedule.milestones belong to a step schedule"),
    ({"schedule.name": "step", "schedule.milestones": [3, 2]}, "schedule.milestones must rise"),
    (
        {"schedule.name": "step", "schedule.milestones": [4]},
        "milestones must lie before the last of 4 epochs, got 4: change them too, or give the epochs by --epochs",
    ),
    (
        {"schedule.warmup_epochs": 5},
        "at most the 4 epochs, but came as 5: change it too, or give the epochs by --epochs",
    ),
    ({"data.split": [0.7, 0.3, 0.2]}, "data.split must be the shares"),
    ({"data.split": [1, 0, 0]}, "data.split must be the shares"),
    ({"distillation.kind": "hard"}, "distillation lacks teacher"),
    ({"model.arguments": [1]}, "model.arguments must be name: value"),
    ({"name": 3}, "name must be a word, but came as 3"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[next(iter(changes)) for changes, _ in MISTAKES])
def test_a_mistake_names_the_key_what_is_allowed_and_what_came(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        small().override(changes)
    assert message in str(error.value)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("epochs: 2\nbatch: 4\noptimiser: {name: sgd, lr: 5e-4}\n")
    recipe = read_recipe(path)
    assert (recipe.name, recipe.optimiser.lr) == ("mine", 5e-4)  # YAML reads 5e-4 as a word
    path.write_text("epochs: 2\nbtach: 4\n")
    with pytest.raises(UserError, match="recipe mine: unknown key 'btach': did you mean 'batch'"):
        read_recipe(path)
    path.write_text("epochs: [")
    with pytest.raises(UserError, match="is not YAML"):
        read_recipe(path)
    path.write_text("- 3")
    with pytest.raises(UserError, match="must hold a recipe"):
        read_recipe(path)
    with pytest.raises(UserError, match="there is no recipe"):
        read_recipe(tmp_path / "other.yaml")
    with pytest.raises(UserError, match="unknown recipe 'diet': did you mean 'deit'"):
        read_recipe("diet")


def test_settings_on_the_command_line_are_yaml() -> None:
    assert parse_setting("augmentation.scale=[0.2, 1]") == ("augmentation.scale", [0.2, 1])
    assert parse_setting("regularisation.clip=null") == ("regularisation.clip", None)
    with pytest.raises(UserError, match="--set takes KEY=VALUE"):
        parse_setting("epochs")
    with pytest.raises(UserError, match="as in YAML"):
        parse_setting("epochs=[")


def test_a_recipe_is_a_value() -> None:
    recipe = read_recipe("park-cifar")
    assert pickle.loads(pickle.dumps(recipe)) == recipe  # worker processes get it so
    with pytest.raises(FrozenInstanceError):
        recipe.epochs = 3  # type: ignore[misc]
    changed = recipe.override({"model.arguments": {"stem": "imagenet"}})
    assert recipe.model.arguments == {"stem": "cifar"} != changed.model.arguments
