"""The recipes that come with this package, and recipes of one's own: a YAML file each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from spatially.errors import UserError, unknown
from spatially.train.recipe import Recipe

FOLDER = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the recipes that come with this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_path(name: str | Path) -> Path:
    """Where a recipe lies: its name, or a file of one's own ending in .yaml."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"there is no recipe {path}")
        return path
    if str(name) not in recipe_names():
        raise unknown("recipe", str(name), recipe_names(), hint="A recipe of your own is a file: --recipe mine.yaml")
    return FOLDER / f"{name}.yaml"


def read_recipe(name: str | Path) -> Recipe:
    """A recipe by its name or from a file, every key checked."""
    path = recipe_path(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a recipe as key: value")
    try:
        return Recipe.read({"name": path.stem, **content})
    except UserError as error:
        raise UserError(f"recipe {path.stem}: {error}") from None


def head_comment(name: str | Path) -> str:
    """What the head of a recipe's file says, without the comment signs."""
    lines = []
    for line in recipe_path(name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def as_yaml(recipe: Recipe) -> str:
    """A recipe in full, as a file that `read_recipe` reads again."""
    return yaml.safe_dump(recipe.describe(), sort_keys=False, allow_unicode=True)


def parse_setting(text: str, *, option: str = "--set", example: str = "optimiser.lr=5e-4") -> tuple[str, Any]:
    """`optimiser.lr=5e-4` as a key and its value, which is read as YAML."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise UserError(f"{option} takes KEY=VALUE, such as {example}, but came as {text!r}")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"{option} {key}=… takes a value as in YAML, but came as {value!r}") from None
