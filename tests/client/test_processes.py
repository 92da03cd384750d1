"""What only whole processes show: their end, forks, and what an unconfigured one imports."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from client.fake_server import BOUND, FakeOrchestrator


def start(script: str, **env: str) -> "subprocess.Popen[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COSLICE_")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean | env,
        text=True,
    )


def configured(fake: FakeOrchestrator) -> dict[str, str]:
    return {"COSLICE_ORCHESTRATOR": fake.address, "COSLICE_JOB": "job-1", "COSLICE_GROUP": "a"}


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=BOUND)
    assert process.returncode == 0, err
    return out.strip()


class TestWithoutConfiguration:
    def test_nothing_of_the_network_is_imported_and_every_call_works(self) -> None:
        script = """
            import sys, coslice
            client = coslice.connect()

            @client.on_accelerators
            def train():
                return "trained"

            assert train() == "trained"
            with client.on_accelerators(group="a") as grant:
                assert grant.leases == () and not grant.restored
            client.acquire("a")
            assert client.yield_("a") and client.yield_() and not client.should_yield()
            client.note("reward", 1.0)
            assert client.status() == coslice.Status()
            client.close()
            heavy = {"grpc", "google.protobuf", "asyncio", "torch", "msgspec", "numpy"}
            print(sorted(heavy & set(sys.modules)))
        """
        assert finish(start(script)) == "[]"

    def test_sections_still_run_on_the_accelerators_cores(self) -> None:
        core = min(os.sched_getaffinity(0))
        script = """
            import os, coslice
            client, before = coslice.connect(), os.sched_getaffinity(0)
            with client.on_accelerators():
                inside = os.sched_getaffinity(0)
            assert os.sched_getaffinity(0) == before
            print(inside)
        """
        assert finish(start(script, COSLICE_ACCELERATOR_CPUS=str(core))) == str({core})

    def test_importing_with_configuration_costs_nothing_either(self, fake: FakeOrchestrator) -> None:
        script = "import sys, coslice; coslice.connect(); print('grpc' in sys.modules)"
        assert finish(start(script, **configured(fake))) == "False"

    def test_a_module_named_types_beside_the_script_does_no_harm(self, tmp_path: Path) -> None:
        (tmp_path / "config.py").write_text("raise RuntimeError('shadowed')")
        (tmp_path / "session.py").write_text("raise RuntimeError('shadowed')")
        script = "import coslice; coslice.connect().acquire()"
        run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False, timeout=BOUND)
        assert run.returncode == 0


def test_the_health_stubs_of_others_can_be_imported_before_and_after() -> None:
    ours = "from coslice.client import link, aio_link"
    theirs = "from grpc_health.v1 import health_pb2_grpc"
    for script in (f"{ours}; {theirs}", f"{theirs}; {ours}"):
        finish(start(script))


class TestTheEndOfAProcess:
    def test_the_end_of_the_interpreter_yields(self, fake: FakeOrchestrator) -> None:
        finish(start("import coslice; coslice.connect().acquire()", **configured(fake)))
        fake.until(lambda: fake.count("goodbye") == 1)
        assert fake.holder("a") is None

    def test_so_does_an_uncaught_exception(self, fake: FakeOrchestrator) -> None:
        process = start("import coslice; coslice.connect().acquire(); 1 / 0", **configured(fake))
        _, err = process.communicate(timeout=BOUND)
        assert "ZeroDivisionError" in err
        fake.until(lambda: fake.count("goodbye") == 1)
        assert fake.holder("a") is None

    def test_an_orchestrator_that_is_gone_does_not_hold_the_process_up(self, fake: FakeOrchestrator) -> None:
        script = "import coslice; coslice.connect().acquire(); print('held', flush=True); input()"
        process = start(script, **configured(fake))
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        fake.kill()
        process.communicate("\n", timeout=BOUND)
        assert process.returncode == 0


class TestForks:
    def test_a_child_owns_nothing_and_sends_nothing(self, fake: FakeOrchestrator) -> None:
        script = """
            import os, coslice
            from coslice.gate import GATE
            client = coslice.connect()
            with client.on_accelerators():
                child = os.fork()
                if child == 0:
                    assert GATE.active == 0 and not client.should_yield()
                    try:
                        client.yield_()
                    except coslice.NotHeld:
                        raise SystemExit(0)  # leaves the block and runs the handlers of an exit
                    raise SystemExit(1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                print(client.status("a").groups[0].state)
        """
        assert finish(start(script, **configured(fake))) == "held"
        assert len(fake.hellos) == fake.count("goodbye") == fake.yields_applied == 1

    def test_a_child_that_uses_its_client_has_a_session_of_its_own(self, fake: FakeOrchestrator) -> None:
        script = """
            import os, sys, coslice
            client = coslice.connect()
            client.acquire()
            client.yield_()
            child = os.fork()
            client.acquire(timeout=15)
            client.yield_()
            if child == 0:
                client.close()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
        finish(start(script, **configured(fake)))
        assert len({(hello.session, hello.pid) for hello in fake.hellos}) == 2
        assert fake.yields_applied == 3

    def test_a_fork_in_the_middle_of_a_wait_leaves_the_parents_place_alone(
        self, fake: FakeOrchestrator
    ) -> None:
        give = fake.take("a")
        script = """
            import os, sys, threading, coslice
            client = coslice.connect()
            thread = threading.Thread(target=client.acquire)
            thread.start()
            input()
            child = os.fork()
            if child == 0:
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            print("forked", flush=True)
            thread.join()
        """
        process = start(script, **configured(fake))
        fake.until_waiting("a", 1)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "forked\n"
        assert len(fake.groups["a"].queue) == 1
        give()
        finish(process)
        assert len(fake.hellos) == 1
