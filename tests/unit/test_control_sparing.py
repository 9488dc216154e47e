"""How many lines of the log one may cause that cannot be kept from causing them."""

from __future__ import annotations

from ds4d.control.sparing import Sparing


def test_some_lines_of_each_stretch_come_through_and_the_rest_is_counted():
    sparing = Sparing(2, 10.0)
    assert [sparing.line(now=t) for t in (1.0, 2.0, 3.0, 10.9)] == [0, 0, None, None]
    assert [sparing.line(now=t) for t in (11.0, 12.0, 13.0)] == [2, 0, None]
    assert sparing.line(now=99.0) == 1
