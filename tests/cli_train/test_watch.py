"""What people see of a run's metric."""

import msgspec
import pytest

from ridgeline.cli.command import Output
from ridgeline.cli.training.watch import Watch, describe
from ridgeline.history import EpochPoint, History
from ridgeline.recording.progress import Progress
from ridgeline.reporting.charts.charts import training_figures
from ridgeline.reporting.page.page_machine import training_reading

READING = Progress(epoch=0, epochs=3, step=1, total_steps=9, loss=1.0, samples_per_s=10.0)


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ((), ""),
        ((0.25,), ", test 25.0 %"),
        ((0.25, 0.5), ", test 50.0 %"),
        ((1.5, 0.5), ", test 0.500"),
        ((0.5, 1.5, 0.25), ", test 0.250"),
        ((None,), ", test not finite"),
        ((None, 0.5), ", test 50.0 %"),
    ],
)
def test_a_metric_keeps_its_unit(metrics: tuple[float | None, ...], shown: str) -> None:
    """A percentage as long as every metric of the run could be a share; what is not finite is said."""
    told = msgspec.structs.replace(READING, metrics=metrics)
    assert describe(told, None) == f"loss 1.00, 10.0 samples/s{shown}"


@pytest.mark.parametrize(
    ("metrics", "told"),
    [((None, None), "not finite"), ((0.5, None), "not finite (highest 50.0 %)")],
)
def test_the_report_names_a_metric_that_is_not_finite(
    metrics: tuple[float | None, ...], told: str
) -> None:
    """It is neither the highest nor a point of the curve."""
    points = [
        EpochPoint(epoch=epoch, step=1, metric=metric, mean_loss=1.0, train_s=1.0)
        for epoch, metric in enumerate(metrics)
    ]
    history = History(task="tiny", epochs=tuple(points))
    assert (
        training_reading(history) == f"After 2 epochs and 2.00 s of training the metric is {told}."
    )
    ((_, figure),) = training_figures(history)
    assert figure["data"][0]["y"] == list(metrics)


def test_the_end_of_an_epoch_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The one with what its evaluation found, though five seconds have gone by before."""
    watch = Watch(Output(), limit_samples_per_s=None)
    readings: list[tuple[int, tuple[float, ...]]] = [
        (1, ()), (3, ()), (3, (0.5,)), (6, (0.5, 0.6)), (9, (0.5, 0.6)), (9, (0.5, 0.6, 0.9)),
    ]  # fmt: skip
    for step, metrics in readings:
        watch._next_line_s = 0.0
        epoch = min(len(metrics), 2)
        watch.show(msgspec.structs.replace(READING, step=step, epoch=epoch, metrics=metrics))
    lines = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["step 1/9", "step 3/9", "step 6/9", "step 9/9"]
