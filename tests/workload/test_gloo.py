"""A job of several processes with live communicators takes part as one, each rank registering itself."""

from pathlib import Path

from forked import context
from workload import rank
from workload.fake_agent import PATIENCE, FakeAgent

from coslice.wire.v1 import coslice_pb2 as pb

WORLD = 4


def test_every_rank_parks_and_returns_and_training_equals_the_undisturbed_run(tmp_path: Path) -> None:
    fork = context()
    with FakeAgent(tmp_path) as agent:
        pipes, processes = [], []
        for number in range(WORLD):
            ours, theirs = fork.Pipe()
            arguments = (number, WORLD, str(tmp_path / "store"), agent.address, theirs)
            processes.append(fork.Process(target=rank.main, args=arguments, daemon=True))
            pipes.append(ours)
        for process in processes:
            process.start()
        streams = {}
        for _ in range(WORLD):
            stream = agent.streams.get(timeout=90)
            streams[stream.register.rank] = stream
        assert set(streams) == set(range(WORLD))

        for step in range(rank.STEPS):
            sizes = [pipe.recv() for pipe in pipes]
            for stream in streams.values():  # all leave before any returns
                stream.commands.put(
                    pb.WorkloadCommand(move_out=pb.MoveOut(op=f"{step}/out", deadline_s=PATIENCE))
                )
            assert [streams[number].answer().moved.bytes for number in range(WORLD)] == sizes
            for stream in streams.values():
                assert stream.move_in(f"{step}/in").HasField("moved")
            for pipe in pipes:
                pipe.send("go on")

        for pipe in pipes:
            plain, moved = pipe.recv()
            assert plain == moved
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode == 0
