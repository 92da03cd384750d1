"""The text that is served is the one that prometheus_client writes."""

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from coslice.observe.board import BLOCK, Board
from coslice.observe.exposition import LINES, pieces
from coslice.observe.metric import SECONDS, VALUES, Metric, Source, histogram


def test_it_is_what_the_library_writes() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as every board does
    registry = CollectorRegistry()
    Gauge("plain", "No label,\nwith a line's end and a \\.", registry=registry).set(-1.5)
    odd = Gauge("odd", "Labels out of order.", ("z", "a"), registry=registry)
    odd.labels('say "so"', "a\\b\nc").set(float("nan"))
    odd.labels("ü", "").set(float("-inf"))
    odd.labels("large", "").set(123456789.5)
    Counter("turns", "Counted.", ("group",), registry=registry).labels("g").inc(3)
    took = Histogram("took_seconds", "Timed.", ("group",), registry=registry, buckets=(0.001, 1.0))
    for number in range(LINES):
        took.labels(f"g{number}").observe(0.5)
    assert "".join(pieces(registry.collect())).encode() == generate_latest(registry)


def test_a_histogram_of_many_groups_comes_in_parts_and_reads_as_one() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as every board does
    told = Metric("took_seconds", "histogram", "Timed.", ("group",))
    parted, whole = CollectorRegistry(), CollectorRegistry()
    same = (
        histogram(told, parted),
        Histogram(told.name, told.help, told.labels, registry=whole, buckets=SECONDS),
    )
    for number in range(20):
        for one in same:
            one.labels(f"g{number}").observe(0.01 * number)
    series = len(SECONDS) + 3  # with those of no bound, of the count and of the sum
    assert [len(family.samples) for family in parted.collect()] == [VALUES // series * series] * 10
    assert "".join(pieces(parted.collect())).encode() == generate_latest(whole)


async def test_a_long_exposition_goes_out_in_blocks_as_it_is_written() -> None:
    board, told = Board(), Metric("size_bytes", "gauge", "Sized.", ("group",))

    def values(_: None) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        for number in range(10_000):
            yield told, (f"g{number}",), float(number)

    board.add(Source((told,), lambda: None, values))
    blocks = [block async for block in board.exposition()]
    assert len(blocks) > 3
    assert max(len(block) for block in blocks) < 2 * BLOCK
    lines = b"".join(blocks).split(b"\n")
    assert [line for line in lines if line.startswith(b"size_bytes{")][
        -1
    ] == b'size_bytes{group="g9999"} 9999.0'
    assert len(lines) > 10_000
