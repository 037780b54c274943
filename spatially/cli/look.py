"""``spatially look``: stub until the picture is there."""
