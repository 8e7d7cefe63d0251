import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta.errors import BudgetError, PolicyError
from delta.units import Bytes, Share, format_bytes, format_ns, parse_bytes, parse_share, parse_size


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (0, 0),
        (8_000_000_000, 8_000_000_000),
        (8e9, 8_000_000_000),
        ("0", 0),
        ("123", 123),
        ("1_000_000", 1_000_000),
        ("1e9", 10**9),
        ("7B", 7),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2MB", 2 * 10**6),
        ("2MiB", 2 * 2**20),
        ("2GB", 2 * 10**9),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        (" 8GiB ", 8 * 2**30),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("1.5GiB", 3 * 2**29),
        (".5KiB", 512),
        ("0.29GB", 290_000_000),  # as a float product this is 289999999.99999994
        ("1.3GiB", 1_395_864_371),  # 1395864371.2, rounded down
        (2**63 - 1, 2**63 - 1),
        ("9223372036854775807", 2**63 - 1),  # more digits than a float holds
    ],
)
def test_sizes(given, nbytes):
    assert parse_size(given, what="budget") == Bytes(nbytes)
    assert parse_bytes(given, what="budget") == nbytes


@pytest.mark.parametrize(
    ("given", "fraction"), [("0%", 0.0), ("40%", 0.4), ("40 %", 0.4), ("33.3%", 0.333), ("100%", 1.0), ("-0%", 0.0)]
)
def test_shares(given, fraction):
    share = parse_size(given, what="activations")
    assert share == Share(fraction)
    assert not str(share).startswith("-")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("8 apples", "unit 'apples' is unknown"),
        ("8g", "unit 'g' is unknown"),
        ("", "not a number"),
        ("GiB", "not a number"),
        ("nan", "not a number"),
        ("inf", "not a number"),
        ("8GiB!", "not a number"),
        ("8GiB 2", "not a number"),
        ("1__0", "not a number"),
        ("1e9999999", "not a number"),
        ("-1GiB", "negative"),
        (-1, "negative"),
        (-1.0, "negative"),
        ("101%", "between 0% and 100%"),
        ("-1%", "between 0% and 100%"),
        (0.4, 'a share is written with its sign, "40%"'),
        (1.0, 'a share is written with its sign, "100%"'),
        ("0.5", 'a share is written with its sign, "50%"'),
        ("1.5", "whole number"),
        ("1.5B", "whole number"),
        (8.5, "whole number"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (10**400, "must be at most 8 EiB"),
        (2**63, "must be at most 8 EiB"),
        ("1e999GB", "must be at most 8 EiB"),
        ("9" * 5000, "must be at most 8 EiB"),
        (True, "truth value"),
        (None, "NoneType"),
        ([1], "list"),
        (Share(1.5), "between 0% and 100%"),
        (Share(float("nan")), "between 0% and 100%"),
        (Bytes(-1), "negative"),
    ],
)
def test_refused(given, why):
    with pytest.raises(BudgetError) as caught:
        parse_size(given, what="budget")
    message = str(caught.value)
    assert message.startswith(f"budget={given!r}: ")
    assert why in message
    assert '"8GiB"' in message and '"40%"' in message and "powers of 1024" in message


def test_a_size_that_is_read_already_passes():
    assert parse_size(Bytes(3), what="budget") == Bytes(3)
    assert parse_size(Share(0.4), what="budget") == Share(0.4)


def test_parse_bytes_refuses_shares_and_does_not_offer_them():
    with pytest.raises(BudgetError, match="share is not allowed") as caught:
        parse_bytes("40%", what="window")
    assert 'such as "40%"' not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("4MiB", "this is not a share"),
        (5, "this is not a share"),
        (0.05, "this is not a share"),
        (Bytes(3), "this is not a share"),
        ("much", "this is not a number with a unit"),
        ("5 apples", "the unit 'apples' is unknown"),
        ("120%", "a share must lie between 0% and 100%"),
        (None, "a NoneType is not a share"),
        (True, "a truth value is not a share"),
    ],
)
def test_parse_share_refuses_sizes_and_does_not_offer_them(given, why):
    with pytest.raises(PolicyError) as caught:
        parse_share(given, what="rounding", error=PolicyError)
    assert str(caught.value) == f'rounding={given!r}: {why}. Give a share such as "40%".'


def test_parse_share():
    assert parse_share("5 %", what="rounding") == parse_share(Share(0.05), what="rounding") == Share(0.05)


def test_the_error_can_be_chosen():
    with pytest.raises(PolicyError, match="min_bytes='8 apples'"):
        parse_bytes("8 apples", what="min_bytes", error=PolicyError)


def test_a_share_of_something_is_rounded_down():
    assert Share(0.4).of(1001) == 400
    assert Share(0.0).of(1001) == 0
    assert Share(1.0).of(1001) == 1001


@given(st.integers(0, 2**40), st.sampled_from([("", 1), ("kB", 1000), ("KiB", 1024), ("MB", 10**6)]))
def test_whole_numbers_are_exact(number, unit):
    assert parse_bytes(f"{number}{unit[0]}", what="budget") == number * unit[1]


@given(st.one_of(st.text(max_size=12), st.floats(), st.integers()))
def test_anything_else_is_refused_or_read(value):
    try:
        size = parse_size(value, what="budget")
    except BudgetError:
        return
    assert size.nbytes >= 0 if isinstance(size, Bytes) else 0 <= size.fraction <= 1


@given(st.floats(0, 1))
def test_a_share_survives_writing(fraction):
    share = parse_size(str(Share(fraction)), what="reserve")
    assert share.fraction == pytest.approx(fraction, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (512 * 1024, "512 KiB"),
        (1_535_000_000, "1.43 GiB"),
        (2**20 - 1, "1 MiB"),  # not "1024 KiB"
        (8 * 2**30, "8 GiB"),
        (-5000, "-4.88 KiB"),
        (10**19, "8882 PiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_300, "1.3 µs"),
        (1_300_000, "1.3 ms"),
        (999_999, "1 ms"),  # not "1000 µs"
        (12_400_000_000, "12.4 s"),
        (10**17, "100000000 s"),
        (-1_300_000, "-1.3 ms"),
    ],
)
def test_format_ns(time_ns, text):
    assert format_ns(time_ns) == text


@given(st.integers(0, 2**49))
def test_what_is_printed_is_near_and_can_be_read(nbytes):
    assert parse_bytes(format_bytes(nbytes), what="budget") == pytest.approx(nbytes, rel=0.006)
