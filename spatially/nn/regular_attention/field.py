"""Which keys a query sees along one axis: the square of `regular_attention` is a product of two such fields.

Query r sees `window` consecutive slots that begin at key `start[r]`. What lies outside the image is the border's matter:

* ``mask``: the slots are centred, `start[r] = r − window // 2`; those outside take no part.
* ``zero``: centred, and the keys are padded with zeros on both sides, so that every slot exists.
* ``shift``: the slots slide inward, `start[r] = min(max(r − window // 2, 0), length − window)`.

A grid smaller than the window has slots that point outside for every query; ``mask`` and ``shift`` leave them out.
"""

from dataclasses import dataclass

BORDERS = ("mask", "zero", "shift")


@dataclass(frozen=True)
class Field:
    """The slots of every query along an axis of `length` positions."""

    length: int
    window: int
    border: str

    @property
    def padding(self) -> int:
        """How many zero keys are added on both sides."""
        return self.window // 2 if self.border == "zero" else 0

    @property
    def keys(self) -> int:
        """Number of keys, padding included."""
        return self.length + 2 * self.padding

    @property
    def starts(self) -> tuple[int, ...]:
        """The key at which each query's slots begin, counted with the padding."""
        begin = self.padding - self.window // 2
        centred = range(begin, begin + self.length)
        if self.border != "shift":
            return tuple(centred)
        last = max(self.length - self.window, 0)
        return tuple(min(max(start, 0), last) for start in centred)
