"""Tables are whole at any width; figures have three digits."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdscache.commands.console import Table, duration, figure, percent, progress_bar, show
from gdscache.sizes import GIB, KIB, MIB, about
from tests.support.terminal import on_terminal

NUMBER = re.compile(r"(?<![\w.])[0-9][0-9.,]*")


def wide() -> Table:
    """A table of 130 columns and more, as a bench prints it."""
    table = Table(
        "Loads against a bare loop", "page", "what", "moved by", "ours", "bare loop", "ratio", "", caption="end"
    )
    for size in ("16KiB", "2MiB", "12.5 MiB"):
        figures = ("31.4 GB/s (30.9 to 32.0)", "12,300 GB/s (12,200 to 12,400)", "0.981 (0.970 to 0.992)")
        table.add_row(size, "load of a prompt that is cached", "native, 12 threads", *figures, "met: at least 0.95")
    return table


def test_a_table_that_fits_is_as_wide_as_its_cells() -> None:
    table = Table("Sizes", "name", "bytes")
    table.add_row("small", "12")
    table.add_row("a large one", "12,300")
    expected = ["Sizes", "name          bytes", "small            12", "a large one  12,300"]
    assert table.lines() == table.lines(80) == expected


@pytest.mark.parametrize("width", [24, 40, 79, 80, 100, 130])
def test_every_number_stays_whole_and_with_its_unit(width: int) -> None:
    lines = wide().lines(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert sorted(NUMBER.findall(text)) == sorted(NUMBER.findall("\n".join(wide().lines())))
    for whole in ("31.4 GB/s", "(30.9 to 32.0)", "12.5 MiB", "12,300 GB/s", "0.981"):
        assert text.count(whole) == "\n".join(wide().lines()).count(whole)


cells = st.lists(st.text("ab1 .,()/%", max_size=40), min_size=1, max_size=6)


@given(st.lists(cells, min_size=1, max_size=4), st.integers(24, 200))
def test_no_cell_loses_a_character_at_any_width(rows: list[list[str]], width: int) -> None:
    table = Table("", *"cdefgh")
    for row in rows:
        table.add_row(*row)
    lines = table.lines(width)
    assert all(len(line) <= width for line in lines)
    for letter in "ab1.()/%":
        assert sum(line.count(letter) for line in lines) == sum(cell.count(letter) for row in rows for cell in row)


def test_pairs_have_no_header_and_wrap_their_text() -> None:
    table = Table()
    table.add_row("directory", "/a/long/path/" + "x" * 60)
    table.add_row("state", "in use by process 12 since this morning, whose command is a long one")
    lines = table.lines(60)
    assert lines[0].startswith("directory  /a/long/path/")
    assert max(map(len, lines)) <= 60
    assert "".join(lines).replace(" ", "").count("x") == 60


def test_a_table_without_rows_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show(Table("empty", "a"), "a line")
    assert capsys.readouterr().out == "a line\n"


SHOWN = (
    "from tests.tools.test_console import wide; from gdscache.commands.console import show; show(wide(), 'word ' * 40)"
)


@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal(columns: int) -> None:
    """What users see: no line is longer than the terminal, nothing is cut."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    code = f"import sys; sys.path[:0] = {path.split(os.pathsep)!r}; {SHOWN}"
    status, text = on_terminal(["-c", code], columns)
    assert status == 0
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    for whole in ("31.4 GB/s", "(12,200 to 12,400)", "0.981 (0.970 to 0.992)" if columns == 200 else "0.981"):
        assert text.count(whole) == 3
    one_line = any("31.4 GB/s" in line and "0.981" in line for line in text.splitlines())
    assert one_line == (columns == 200)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.012, "0.0120"), (0.9996, "1.00"), (31.42, "31.4"), (99.96, "100"), (-2.345, "-2.35"),
        (12345, "12,300"),
    ],
)  # fmt: skip
def test_three_significant_digits(value: float, text: str) -> None:
    assert figure(value) == text
    assert figure(value, "GB/s") == f"{text} GB/s"


def test_times_and_shares_choose_their_unit() -> None:
    assert [duration(s) for s in (90.0, 1.5, 0.99996, 0.0123, 4.56e-6, 7.8e-8, 0)] == [
        *("90.0 s", "1.50 s", "1.00 s", "12.3 ms", "4.56 us", "78.0 ns", "0 s")
    ]
    assert percent(0.12345) == "12.3 %"
    assert [about(n) for n in (12, 3 * GIB, 1500 * MIB, 100 * GIB + 7, 1000 * KIB + 1)] == [
        *("12 bytes", "3 GiB", "1.46 GiB", "100 GiB", "1,000 KiB")
    ]


def test_no_bar_is_drawn_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:
        progress(1, 2, "half")
    assert capfd.readouterr() == ("", "")


def test_a_bench_says_in_a_log_how_far_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar(lines=True) as progress:
        for done, text in ((0, "first"), (0, "first"), (1, "second")):
            progress(done, 2, text)
    assert capfd.readouterr() == ("", "0 s, 0 of 2: first\n0 s, 1 of 2: second\n")
