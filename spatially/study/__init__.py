"""Models × probes × images: planned, run by any number of processes, resumed, and stored."""

from spatially.study.run import run_study
from spatially.study.spec import Study, read_study
from spatially.study.store import Store

__all__ = ["Store", "Study", "read_study", "run_study"]
