import pytest
from hypothesis import given
from hypothesis import strategies as st

from coslice.errors import ConfigError
from coslice.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("4GB", 4 * 10**9),
        ("7", 7),
        ("64k", 64 << 10),
        ("2M", 2 << 20),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1GiB", "0", "12 parsecs", "1e9", "nan", "1.2.3M", "½GiB"])
def test_a_malformed_size_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@given(st.integers(1, 1 << 50))
def test_what_we_print_we_can_read(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.06)


@given(st.text())
def test_any_text_is_a_size_or_a_clear_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigError as error:
        size, words = 1, str(error)
    else:
        words = repr(text)
    assert size > 0
    assert repr(text) in words
