"""Everything a training is at one moment, as tensors and plain facts, and back: weights, optimiser, average, randomness."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim import Optimizer

from spatially.errors import UserError
from spatially.train.step import TrainingStep

Groups = dict[str, dict[str, Tensor]]


def capture(step: TrainingStep) -> tuple[Groups, dict[str, Any]]:
    """The state of a training's parts; every process must call it, since each has randomness of its own."""
    optimiser, plain = optimiser_state(step.optimiser)
    groups: Groups = {"weights": weights(step.model), "optimiser": optimiser}
    facts: dict[str, Any] = {"updates": step.updates, "optimiser": plain}
    if step.average is not None:
        groups["average"] = weights(step.average.module)
    if step.scaler is not None:
        facts["scaler"] = step.scaler.state_dict()
    states = gather_object([random_state()])
    groups["random"] = {f"{rank}.{name}": value for rank, one in enumerate(states) for name, value in one.items()}
    return groups, facts


def restore(step: TrainingStep, groups: Mapping[str, dict[str, Tensor]], facts: Mapping[str, Any], rank: int) -> None:
    """Put a captured state back."""
    load_weights(step.model, groups["weights"])
    load_optimiser(step.optimiser, groups["optimiser"], facts["optimiser"])
    if step.average is not None:
        load_weights(step.average.module, groups["average"])
    if step.scaler is not None:
        step.scaler.load_state_dict(facts["scaler"])
    step.updates = int(facts["updates"])
    own = {name.partition(".")[2]: value for name, value in groups["random"].items() if name.startswith(f"{rank}.")}
    if own:  # more processes than before: theirs are as they were seeded
        set_random_state(own)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def load_weights(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    own = weights(model)
    missing, extra = own.keys() - values.keys(), values.keys() - own.keys()
    shapes = {name for name in own.keys() & values.keys() if own[name].shape != values[name].shape}
    if missing or extra or shapes:
        names = ", ".join(sorted(missing | extra | shapes)[:4])
        raise UserError(f"resume: the checkpoint is of another model; they differ in {names}, …; give another --out")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(values[name])


def optimiser_state(optimiser: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Its tensors by number of the parameter and name, and everything that is a plain value."""
    state = optimiser.state_dict()
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{name}"] = value
            else:
                plain.setdefault(str(number), {})[name] = value
    return tensors, {"state": plain, "groups": state["param_groups"]}


def load_optimiser(optimiser: Optimizer, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """The opposite of :func:`optimiser_state`; JSON has made lists of tuples."""
    state: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in plain["state"].items()}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    groups = []
    for own, saved in zip(optimiser.state_dict()["param_groups"], plain["groups"], strict=True):
        # how the update is computed is up to this machine
        kept = {"foreach", "fused", "params"}
        group = {name: tuple(value) if isinstance(own.get(name), tuple) else value for name, value in saved.items()}
        groups.append({**group, **{name: own[name] for name in kept & own.keys()}})
    optimiser.load_state_dict({"state": state, "param_groups": groups})


def random_state() -> dict[str, Tensor]:
    """Of torch on the CPU and on this process's GPU, of numpy and of Python."""
    version, words, gauss = random.getstate()
    numbers: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    state = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([version, *words]),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*numbers[1].tolist(), numbers[2], numbers[3]]),
        "numpy_gauss": torch.tensor([numbers[4]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """The opposite of :func:`random_state`."""
    torch.set_rng_state(state["cpu"])
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    key = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, float(state["numpy_gauss"][0])))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(seed: int) -> None:
    """All generators from one number."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002


@contextmanager
def kept_randomness() -> Iterator[None]:
    """All generators as they were, afterwards."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
