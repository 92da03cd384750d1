"""Two jobs, one group, real sockets: whose turn it is and what they are told."""

from orchestrator.world import World


async def test_two_sessions_take_turns(world: World) -> None:
    await world.start()
    agent = await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    epochs = []
    first = await a.acquire("pool")
    agent.load("pool", "job-a", 100)
    for _ in range(3):
        wants = await b.ask("pool")
        await a.until("pool", lambda group: len(group.waiters) == 1)
        assert not b.answered(wants)
        assert (await a.yielded(first)).waiting == 0
        second = await b.granted(wants)
        agent.states.setdefault("job-b", 60)
        wants = await a.ask("pool")
        await b.yielded(second)
        first = await a.granted(wants)
        epochs += [second.leases[0].epoch, first.leases[0].epoch]
    assert epochs == sorted(set(epochs))
    assert first.leases[0].restored
    assert first.leases[0].bytes_in == 100
    assert agent.live("pool") == "job-a"
