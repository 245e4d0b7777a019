"""What commands tell of their progress where there is no terminal."""

import pytest

from cli.progress_lines import ProgressLines
from cli.terminal import note, progress_bar

Capture = pytest.CaptureFixture[str]


def test_a_line_now_and_then(capsys: Capture) -> None:
    clock = 1000.0
    with ProgressLines("measurements", note, lambda: clock) as bar:
        task = bar.add_task("Computing on tiny", total=4)
        assert capsys.readouterr().err == "Computing on tiny: 0 of 4 measurements in 0 s\n"
        clock += 9
        bar.advance(task)
        assert capsys.readouterr().err == ""  # not every step has one
        clock += 9
        bar.advance(task)
        assert (
            capsys.readouterr().err
            == "Computing on tiny: 2 of 4 measurements in 18 s, about 18 s to go\n"
        )
        clock += 1
        bar.update(task, completed=4)
        bar.update(task, completed=4)
    assert capsys.readouterr().err == "Computing on tiny: 4 of 4 measurements in 19 s\n"


def test_without_a_terminal_they_come_instead_of_a_bar_that_shows_at_its_end_only(
    capsys: Capture,
) -> None:
    with progress_bar("nonces") as bar:
        task = bar.add_task("Job 1", total=None)
        assert capsys.readouterr().err == "Job 1: 0 nonces in 0 s\n"
        bar.update(task, completed=1200, total=1200)
        assert capsys.readouterr().err == "Job 1: 1,200 of 1,200 nonces in 0 s\n"
