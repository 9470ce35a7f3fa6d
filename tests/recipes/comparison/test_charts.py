"""Charts: where points lie, which ticks are drawn, and that nothing of a label is markup."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from recipes.comparison.charts import HEIGHT, WIDTH, Line, averaged, line_chart, log_ticks, number, ticks
from tests.recipes.comparison.made import EVIL


def line(y, x=None, label="run"):
    return Line(0, label, np.arange(1.0, len(y) + 1) if x is None else np.array(x, float), np.array(y, float))


@pytest.mark.parametrize("size", [1e-3, 0.7, 1.0, 3.0, 49.9, 1e6])
@pytest.mark.parametrize("low", [0.0, -2.0, 0.3, 1234.5])
def test_ticks_are_few_and_round_and_cover_the_range(low, size):
    found = ticks(low, low + size)
    steps = np.diff(found)
    assert 2 <= len(found) <= 8 and found[0] <= low + 1e-6 * size
    assert steps == pytest.approx(steps[0], rel=1e-6) and found[-1] + steps[0] > low + size * 0.999
    assert f"{steps[0]:.0e}"[0] in "125"


def test_ticks_of_a_single_value():
    assert len(ticks(3.0, 3.0)) > 1 and len(ticks(0.0, 0.0)) > 1


def test_logarithmic_ticks():
    assert log_ticks(np.array([0.03, 3.0])) == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2])
    assert log_ticks(np.array([2e-8, 5.0])) == pytest.approx([1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1])


def test_numbers_are_short():
    assert [number(value) for value in (0.05, 2500.0, 128000.0, -2e6, 0)] == ["0.05", "2.5k", "128k", "-2M", "0"]


def test_many_points_are_averaged():
    found = averaged(line(range(1000)), points=10)
    assert found.x.tolist() == [50.5 + 100 * i for i in range(10)] == (found.y + 1).tolist()
    assert averaged(line([1, np.nan, 3, np.inf])).x.tolist() == [1, 3]


def points_of(svg):
    path = re.search(r'class="line run0" d="M([^"]+)"', svg)[1]
    return [tuple(map(float, point.split())) for point in path.split("L")]


@pytest.mark.parametrize("values", [[1, 2, 3], [3.0, 1e-3, 1.0], [-5, 5, -5], [7, 7, 7]])
def test_lines_lie_inside_of_the_chart_and_keep_their_order(values):
    svg = line_chart("loss", [line(values)], "batches")
    found = points_of(svg)
    assert all(0 <= a <= WIDTH and 0 <= b <= HEIGHT for a, b in found)
    below = [-b for _, b in found]
    assert np.argsort(below, kind="stable").tolist() == np.argsort(values, kind="stable").tolist()
    assert [a for a, _ in found] == sorted(a for a, _ in found)


def test_a_wide_range_is_logarithmic_and_said():
    svg = line_chart("loss", [line([1.0, 0.1, 0.01])], "hours")
    (_, a), (_, b), (_, c) = points_of(svg)
    assert a - b == pytest.approx(b - c, abs=0.2)
    assert ElementTree.fromstring(svg).get("aria-label") == "loss against hours, logarithmic: run ends at 0.01"


def test_labels_are_text():
    svg = line_chart(EVIL, [line([1.0, 2.0], label=EVIL)], "batches")
    tree = ElementTree.fromstring(svg)  # well-formed
    assert EVIL in tree.get("aria-label")
    assert {element.tag for element in tree.iter()} <= {"svg", "path", "text", "circle", "title"}
