"""Figures in words: enough digits, a fitting prefix, never without a unit."""

import pytest

from dualtrack.reporting.quantities import range_beside, with_binary_prefix, with_digits, with_time_unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (with_digits(1234.567), "1,235"),
        (with_digits(0.012345), "0.0123"),
        (with_digits(0.99996), "1.00"),
        (with_digits(9.996), "10.0"),
        (with_digits(1.5e-9), "1.50e-09"),
        (with_digits(0), "0"),
        (with_digits(float("nan")), "nan"),
        (with_binary_prefix(41.5 * 2**20), "41.5 MiB"),
        (with_binary_prefix(0), "0 B"),
        (with_binary_prefix(1023), "1,023 B"),
        (with_binary_prefix(5 * 2**50), "5,120 TiB"),
        (with_time_unit(0.00192), "1.92 ms"),
        (with_time_unit(5e-6), "5.00 µs"),
        (with_time_unit(90), "90.0 s"),
        (with_time_unit(600), "10.0 min"),
        (with_time_unit(9000), "2.50 h"),
        (range_beside(0.9e-3, 1.1e-3, 1.0, "s"), "0.000900\u20130.00110"),
        (range_beside(0.0019, 0.0021, 0.002, "s"), "1.90\u20132.10"),
    ],
)
def test_quantities_read_well(text, expected):
    assert text == expected
