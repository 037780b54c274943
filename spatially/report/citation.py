"""How to cite the tool and the paper behind the probes."""

from spatially.version import __version__

SOFTWARE = f"""\
@software{{spatially,
  title   = {{spatially: does a vision model see spatial structure, or a bag of patches?}},
  author  = {{{{The spatially authors}}}},
  version = {{{__version__}}}
}}"""

XU = """\
@inproceedings{xu2024spatial,
  title     = {Vision Transformer with High Spatial Structure Sensitivity},
  author    = {Xu, Zhiwei},
  editor    = {Nguyen, Vu and Lin, Hsuan-Tien},
  booktitle = {Asian Conference on Machine Learning (ACML)},
  year      = {2024}
}"""
