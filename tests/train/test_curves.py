"""Learning curves show the rows of the log."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from spatially.train.curves import draw_curves

ROWS: list[dict[str, Any]] = [
    {"epoch": epoch, "rate": 0.1 / (1 + epoch), "train_loss": 2.0 - epoch, "train_accuracy": 0.1 * epoch,
     "validation_loss": None if epoch == 1 else 2.5 - epoch, "validation_accuracy": 0.05 * epoch}
    for epoch in range(3)
]  # fmt: skip


def test_each_panel_has_its_columns_and_epochs_count_from_one() -> None:
    figure = draw_curves(ROWS, "tiny, vanilla")
    columns = {
        "loss": {"training": "train_loss", "validation": "validation_loss"},
        "accuracy": {"training": "train_accuracy", "validation": "validation_accuracy"},
        "learning rate": {"training": "rate"},
    }
    for panel, (name, lines) in zip(figure.axes, columns.items(), strict=True):
        assert name in {panel.get_title(loc=place) for place in ("left", "center", "right")}
        drawn = {str(line.get_label()): line for line in panel.lines}
        assert drawn.keys() == lines.keys()
        for label, column in lines.items():
            assert list(drawn[label].get_xdata()) == [1, 2, 3]  # type: ignore[arg-type]
            expected = np.array([row[column] for row in ROWS], float)
            np.testing.assert_array_equal(np.array(drawn[label].get_ydata(), float), expected)
    plt.close(figure)
