"""The gate: sections and movers exclude each other, and sections run on the accelerator's cores."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from coslice.errors import ConfigError, StateOffloaded
from coslice.gate import Gate, Section

BOUND = 20.0
CPUS = sorted(os.sched_getaffinity(0))
ONE = {CPUS[-1]}


@pytest.fixture
def gate() -> Iterator[Gate]:
    before = os.sched_getaffinity(0)
    yield Gate()
    assert os.sched_getaffinity(0) == before


def in_thread(work: "callable") -> object:  # type: ignore[valid-type]
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(BOUND)
    return results[0]


def test_a_mover_is_kept_out_while_a_section_is_open(gate: Gate) -> None:
    gate.enter()
    assert gate.active == 1
    assert not gate.try_close(0)
    assert not gate.closed
    gate.leave()
    assert gate.try_close(0)
    assert gate.closed


def test_a_mover_that_waits_gets_in_as_soon_as_the_last_section_ends(gate: Gate) -> None:
    gate.enter()
    gate.enter()
    closed = threading.Event()
    mover = threading.Thread(target=lambda: gate.try_close(BOUND) and closed.set())
    mover.start()
    gate.leave()
    assert not closed.is_set()
    gate.leave()
    assert closed.wait(BOUND)
    mover.join(BOUND)


def test_a_section_is_refused_while_the_state_is_out_and_the_error_names_the_missing_call(gate: Gate) -> None:
    assert gate.try_close(0)
    with pytest.raises(StateOffloaded, match=r"acquire\(\)"):
        gate.enter()
    assert gate.active == 0
    gate.open()
    gate.enter()
    gate.leave()


def test_sections_and_movers_meet_only_where_they_share_a_group(gate: Gate) -> None:
    section = gate.enter(["a"])
    assert not gate.try_close(0, "a")
    assert gate.try_close(0, "b")
    with pytest.raises(StateOffloaded):
        gate.enter(["b"])
    with pytest.raises(StateOffloaded):
        gate.enter()
    other = gate.enter(["a"])
    gate.leave(other)
    gate.open("b")
    gate.leave(section)


@pytest.mark.skipif(len(CPUS) < 2, reason="pinning shows only where there are two cores")
class TestCores:
    def test_the_outermost_section_pins_its_thread_and_gives_the_affinity_back(self, gate: Gate) -> None:
        gate.configure(ONE)
        before = os.sched_getaffinity(0)
        gate.enter()
        gate.enter()
        assert os.sched_getaffinity(0) == ONE
        gate.leave()
        assert os.sched_getaffinity(0) == ONE
        gate.leave()
        assert os.sched_getaffinity(0) == before

    def test_a_thread_inside_a_section_knows_the_cores_it_has_outside(self, gate: Gate) -> None:
        before = os.sched_getaffinity(0)
        assert gate.home() == before
        gate.configure(ONE)
        gate.enter()
        assert gate.home() == before
        gate.leave()

    def test_another_process_with_the_number_of_a_thread_that_ended_is_left_alone(self, gate: Gate) -> None:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
            section = Section(frozenset(), other.pid)
            gate._sections, gate._pinned = [section], {other.pid: ONE}
            before = os.sched_getaffinity(other.pid)
            gate.leave(section)
            assert os.sched_getaffinity(other.pid) == before

    def test_other_threads_are_left_alone(self, gate: Gate) -> None:
        gate.configure(ONE)
        before = os.sched_getaffinity(0)
        started, leave = threading.Event(), threading.Event()

        def section() -> None:
            gate.enter()
            started.set()
            leave.wait(BOUND)
            gate.leave()

        thread = threading.Thread(target=section)
        thread.start()
        assert started.wait(BOUND)
        assert os.sched_getaffinity(0) == before
        leave.set()
        thread.join(BOUND)

    def test_a_section_left_by_another_thread_unpins_the_one_that_entered(self, gate: Gate) -> None:
        gate.configure(ONE)
        section = gate.enter()
        in_thread(lambda: gate.leave(section))
        assert os.sched_getaffinity(0) == set(CPUS)
        assert gate.active == 0

    def test_a_forked_child_has_no_section_and_its_parents_own_affinity(self) -> None:
        """From a process of its own: ours may have threads of gRPC's by now, whose locks no child gets."""
        program = (
            "import os\n"
            "from coslice.gate import GATE\n"
            "before = os.sched_getaffinity(0)\n"
            "GATE.configure([max(before)])\n"
            "GATE.enter()\n"
            "if not (child := os.fork()):\n"
            "    os._exit(not (GATE.active == 0 and os.sched_getaffinity(0) == before))\n"
            "assert os.sched_getaffinity(0) == {max(before)}\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_cores_that_do_not_exist_are_refused_with_the_setting_to_look_at(gate: Gate) -> None:
    gate.configure([100_000])
    with pytest.raises((ConfigError, OverflowError), match=r"COSLICE_ACCELERATOR_CPUS"):
        gate.enter()
    assert gate.active == 0


def test_hooks_run_at_the_end_of_the_last_section_while_the_state_still_cannot_move(gate: Gate) -> None:
    seen: list[tuple[int, bool]] = []
    gate.on_leave(lambda: seen.append((gate.active, gate.try_close(0))))
    gate.enter()
    gate.enter()
    gate.leave()
    assert seen == []
    gate.leave()
    assert seen == [(1, False)]


def test_a_hook_that_fails_does_not_keep_the_section_open(gate: Gate) -> None:
    gate.on_leave(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    gate.enter()
    gate.leave()
    assert gate.active == 0


def test_leaving_twice_is_harmless(gate: Gate) -> None:
    section, other = gate.enter(), gate.enter()
    gate.leave(section)
    gate.leave(section)
    assert gate.active == 1
    gate.leave(other)
