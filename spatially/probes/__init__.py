"""One measurement a file: ``run(subject, images)`` gives an ``xarray.Dataset``."""

from spatially.errors import unknown
from spatially.probes.base import Probe
from spatially.probes.cost import Cost
from spatially.probes.fourier import Fourier
from spatially.probes.frequency_noise import FrequencyNoise
from spatially.probes.hessian import Hessian
from spatially.probes.interaction_ratio import InteractionRatio
from spatially.probes.interpolation import Interpolation
from spatially.probes.landscape import Landscape
from spatially.probes.paste import Paste
from spatially.probes.position_bias import PositionBias
from spatially.probes.receptive_field import ReceptiveField
from spatially.probes.robustness import Robustness
from spatially.probes.sensitivity import Sensitivity
from spatially.probes.shape_bias import ShapeBias
from spatially.probes.variance import Variance

PROBES: dict[str, type[Probe]] = {
    probe.name: probe
    for probe in (
        Sensitivity,
        Paste,
        Fourier,
        Variance,
        ReceptiveField,
        PositionBias,
        InteractionRatio,
        FrequencyNoise,
        Hessian,
        Landscape,
        Interpolation,
        Robustness,
        ShapeBias,
        Cost,
    )
}


def probe_class(name: str) -> type[Probe]:
    """A probe's class by its name, in any case."""
    found = PROBES.get(name.lower())
    if found is None:
        raise unknown("probe", name, PROBES)
    return found


__all__ = [
    "PROBES",
    "Cost",
    "Fourier",
    "FrequencyNoise",
    "Hessian",
    "InteractionRatio",
    "Interpolation",
    "Landscape",
    "Paste",
    "PositionBias",
    "Probe",
    "ReceptiveField",
    "Robustness",
    "Sensitivity",
    "ShapeBias",
    "Variance",
    "probe_class",
]
