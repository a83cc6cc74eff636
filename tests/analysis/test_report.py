"""The report: well-formed, self-contained, escaped, and its marks stand where the numbers say."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from looped.analysis import charts
from looped.analysis.report import own_threshold, render
from looped.analysis.svg import Scale, nice_ceiling
from tests.analysis.results import SPEEDS, made_up

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Collects tags, text and attributes; complains about tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> inside <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words += data


def read(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    return checker


def test_well_formed_and_self_contained() -> None:
    page = render(made_up())
    seen = read(page)
    assert {"html", "style", "svg", "table", "main"} <= set(seen.tags)
    assert not {"script", "link", "img", "iframe", "object"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name in ("src", "href", "xlink:href") or name.startswith("on")]
    assert not re.search(r"https?:|//[a-z]|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_text_is_escaped() -> None:
    page = render(made_up(question='<script>alert("x")</script> & co', expected="</p><b>"))
    assert "script" not in read(page).tags
    assert '<script>alert("x")</script> & co' in read(page).words
    assert "is <7>" in read(page).words


def test_numbers_and_their_errors_are_printed() -> None:
    words = read(render(made_up())).words
    for text in ("82.0 ± 4.0 %", "n = 96", "96 problems", "1.50 ×", "S_e2e = 1.550", "642", "91.0%", "12.5 KiB"):
        assert text in words, text


def test_the_own_point_is_the_native_gate_at_the_threshold_of_the_bench() -> None:
    results = made_up()
    point = results.scores.native(own_threshold(results))
    assert point is not None
    assert (point.gate, point.threshold, point.layout) == ("native", 0.5, "ragged")


def test_marks_stand_where_the_numbers_say() -> None:
    drawn = charts.accuracy_panel(made_up().scores, "ragged")
    read(drawn)
    assert drawn.count('class="hit"') == 5
    # The panel spans depths 1..4 over x = 34..308 and shares 0..1 over y = 192..8.
    x, y = 34 + (2.78 - 1) / 3 * 274, 192 - 0.82 * 184
    assert f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="9"/>' in drawn
    assert f'y1="{y + 0.04 * 184:.1f}"' in drawn  # the bar of one standard error


def test_bars_are_in_proportion_and_the_bound_stands_at_its_speed() -> None:
    results = made_up()
    drawn = charts.throughput(results.bench)
    read(drawn)
    widths = [float(width) for width in re.findall(r'<rect class="bar[^"]*"[^>]* width="([\d.]+)"', drawn)]
    assert [width / widths[0] for width in widths] == pytest.approx(
        [s / SPEEDS["cb"] for s in SPEEDS.values()], abs=1e-2
    )
    bound = re.search(r'<line class="bound" x1="([\d.]+)"', drawn)
    assert bound is not None
    assert (float(bound[1]) - 76) / widths[0] == pytest.approx(1.55, abs=1e-2)


def test_exit_shares_fill_the_bar() -> None:
    drawn = charts.exits([("a", (1, 0, 3, 4))], 4)
    read(drawn)
    shares = [float(width) + 2 for width in re.findall(r'<rect class="depth"[^>]* width="([\d.]+)"', drawn)]
    assert [share / sum(shares) for share in shares] == pytest.approx([1 / 8, 3 / 8, 4 / 8], abs=1e-2)


@pytest.mark.parametrize(("value", "above"), [(1, 1), (1.01, 1.5), (412, 500), (640, 800), (0.07, 0.08), (1000, 1000)])
def test_round_numbers(value: float, above: float) -> None:
    assert nice_ceiling(value) == pytest.approx(above)


def test_scale() -> None:
    assert Scale(1, 4, 30, 330)(2) == pytest.approx(130)
