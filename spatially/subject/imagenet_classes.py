"""Published subsets of ImageNet's 1000 classes, by their numbers, and where a model has them.

* ``IMAGENET_A``: the 200 classes of ImageNet-A (Hendrycks et al. 2019).
* ``SIXTEEN``: the 16 entry-level categories of Geirhos et al. (2019, "ImageNet-trained CNNs are biased towards texture") and
  the classes that their evaluation counts for each.
"""

from collections.abc import Iterable
from functools import cache

from spatially.errors import NotApplicable
from spatially.subject.classes import imagenet
from spatially.subject.subject import Subject

_IMAGENET_A = """
    6 11 13 15 17 22 23 27 30 37 39 42 47 50 57 70 71 76 79 89 90 94 96 97 99 105 107 108 110 113 124 125 130 132 143
    144 150 151 207 234 235 254 277 283 287 291 295 298 301 306 307 308 309 310 311 313 314 315 317 319 323 324 326
    327 330 334 335 336 347 361 363 372 378 386 397 400 401 402 404 407 411 416 417 420 425 428 430 437 438 445 456
    457 461 462 470 472 483 486 488 492 496 514 516 528 530 539 542 543 549 552 557 561 562 569 572 573 575 579 589
    606 607 609 614 626 627 640 641 642 643 658 668 677 682 684 687 701 704 719 736 746 749 752 758 763 765 768 773
    774 776 779 780 786 792 797 802 803 804 813 815 820 823 831 833 835 839 845 847 850 859 862 870 879 880 888 890
    897 900 907 913 924 932 933 934 937 943 945 947 951 954 956 957 959 971 972 980 981 984 986 987 988
"""
IMAGENET_A = tuple(int(number) for number in _IMAGENET_A.split())

_BIRDS = ((8, 8), (10, 16), (18, 20), (22, 24), (80, 83), (87, 96), (98, 100), (127, 133), (135, 145))
_DOGS = (
    *((152, 191), (193, 203), (205, 226), (228, 241), (243, 250), (252, 257), (259, 259), (261, 263)),
    (265, 268),
)


def _ranges(ends: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(number for first, last in ends for number in range(first, last + 1))


SIXTEEN: dict[str, tuple[int, ...]] = {
    "airplane": (404,),
    "bear": (294, 295, 296, 297),
    "bicycle": (444, 671),
    "bird": _ranges(_BIRDS),
    "boat": (472, 554, 625, 814, 914),
    "bottle": (440, 720, 737, 898, 899, 901, 907),
    "car": (436, 511, 817),
    "cat": (281, 282, 283, 284, 285, 286),
    "chair": (423, 559, 765, 857),
    "clock": (409, 530, 892),
    "dog": _ranges(_DOGS),
    "elephant": (385, 386),
    "keyboard": (508, 878),
    "knife": (499,),
    "oven": (766,),
    "truck": (555, 569, 656, 675, 717, 734, 864, 867),
}


@cache
def imagenet_synsets() -> tuple[str, ...]:
    """The synsets of the 1000 classes, in their order."""
    return imagenet(1000).synsets or ()


def imagenet_places(subject: Subject, *, purpose: str) -> tuple[int, ...]:
    """Where each of the 1000 classes stands among the model's own; ``purpose`` says what they are needed for.

    A model of 1000 answers whose classes have no names counts as one of ImageNet, in ImageNet's order.
    """
    own = subject.own()
    if subject.synsets is None:
        if own.answers == 1000 and own.class_names is None:
            return tuple(range(1000))
        raise NotApplicable(f"{purpose} needs a model with the 1000 classes of ImageNet, which {subject.name} has not")
    where = {synset: place for place, synset in enumerate(subject.synsets)}
    missing = sum(synset not in where for synset in imagenet_synsets())
    if missing:
        raise NotApplicable(f"{purpose} needs the 1000 classes of ImageNet; {subject.name} lacks {missing} of them")
    return tuple(where[synset] for synset in imagenet_synsets())
