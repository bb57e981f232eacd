import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.report.numbers import BARS, KEPT, Course, bytes_in_words, clock, short, spark

NUMBERS = st.floats(-1e9, 1e9)


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (0, 2, "0"),
        (3.1e-7, 2, "3e-7"),
        (-3.1e-7, 3, "-3.1e-7"),
        (0.041, 2, "0.041"),
        (0.04, 2, "0.04"),
        (6.13, 2, "6.1"),
        (903, 2, "903"),
        (100, 2, "100"),
        (-0.01234, 3, "-0.0123"),
        (12345.6, 2, "12,346"),
        (2e7, 2, "2e7"),
    ],
)
def test_numbers_are_short(number, digits, text):
    assert short(number, digits) == text


@given(number=st.floats(-1e300, 1e300), digits=st.integers(2, 4))
def test_a_short_number_is_near_the_number_and_short(number, digits):
    text = short(number, digits)
    assert len(text) <= 12
    # One digit less where a power of ten is written.
    assert math.isclose(float(text.replace(",", "")), number, rel_tol=0.6 * 10.0 ** (2 - digits), abs_tol=0)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (-2.5 * 2**20, "-2.5 MiB"),
        (391 * 2**20, "391 MiB"),
        (140 * 2**30, "140 GiB"),
        (3000 * 2**30, "3000 GiB"),
    ],
)
def test_bytes_are_written_with_a_fitting_unit(count, text):
    assert bytes_in_words(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (42.4, "0:42"), (59.6, "1:00"), (725, "12:05"), (3723, "1:02:03")]
)
def test_a_time_is_written_as_a_clock_does(seconds, text):
    assert clock(seconds) == text


def test_a_course_that_rises_is_drawn_rising():
    assert spark(range(8), 8) == BARS
    assert spark([5.0, 5.0], 8) == "▁▁"
    assert spark([], 8) == spark([1.0], 0) == ""


@given(points=st.lists(NUMBERS, min_size=1), width=st.integers(1, 80))
def test_a_course_fills_its_room_and_no_more(points, width):
    drawn = spark(points, width)
    assert len(drawn) == min(width, len(points))
    assert set(drawn) <= set(BARS)


@given(count=st.integers(0, 5 * KEPT))
def test_a_course_is_kept_in_bounded_room_from_its_beginning_to_now(count):
    course = Course()
    for number in range(count):
        course.add(float(number))
    assert len(course.points) < 2 * KEPT
    assert course.points == sorted(course.points)
    if count:
        # The first point is the mean of the first few; the last one is not far from now.
        few = max(1, math.ceil(count / KEPT))
        assert course.points[0] <= few
        assert course.points[-1] >= count - 2 * few - 1
