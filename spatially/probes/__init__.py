"""One measurement a file: ``run(subject, images)`` gives an ``xarray.Dataset``."""

from spatially.errors import unknown
from spatially.probes.base import Probe
from spatially.probes.paste import Paste
from spatially.probes.sensitivity import Sensitivity

PROBES: dict[str, type[Probe]] = {probe.name: probe for probe in (Sensitivity, Paste)}


def probe_class(name: str) -> type[Probe]:
    """A probe's class by its name, in any case."""
    found = PROBES.get(name.lower())
    if found is None:
        raise unknown("probe", name, PROBES)
    return found


__all__ = ["PROBES", "Paste", "Probe", "Sensitivity", "probe_class"]
