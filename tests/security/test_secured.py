"""Beyond loopback: real TLS handshakes, and tokens that open what they are for and nothing else."""

import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from agent.conftest import MIB, Node
from msgspec.structs import replace
from orchestrator.world import World

import coslice
from coslice.agent.app import AgentApp
from coslice.agent.config import AgentConfig
from coslice.cli.security import make_certs, make_token
from coslice.core.ids import NodeId
from coslice.errors import ConfigError, Denied
from coslice.orchestrator import app as app_module
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig, agents_address, check
from coslice.security import tokens
from coslice.security.credentials import Credentials, credentials_from
from coslice.security.listening import Tls, make_tls
from coslice.testing.fake_agent import FakeAgent
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

BOUND = 20.0
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates need openssl")


@dataclass
class Keys:
    """Everything that an operator makes once."""

    folder: Path
    secret: Path

    def tls(self, name: str = "server") -> Tls:
        return Tls(
            str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"), str(self.folder / "ca.pem")
        )

    def token(self, name: str = "", role: str = "job", ttl: str = "1h") -> str:
        return make_token(name, secret=self.secret, role=role, ttl=ttl)

    def caller(self, token: str = "", cert: str = "") -> Credentials:
        made = {"cert": f"{self.folder}/{cert}.pem", "key": f"{self.folder}/{cert}.key"} if cert else {}
        return Credentials(ca=str(self.folder / "ca.pem"), token=token, **made)


LONG = "n" * 200


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    if shutil.which("openssl") is None:
        pytest.skip("certificates need openssl")
    folder = tmp_path_factory.mktemp("keys")
    make_certs(folder / "certs", names=("localhost",), nodes=("n1", "n2", LONG))
    make_certs(folder / "others", names=("localhost",), nodes=("n1",))
    tokens.create_secret(folder / "secret")
    return Keys(folder / "certs", folder / "secret")


@pytest.fixture
async def secured(keys: Keys) -> AsyncIterator[OrchestratorApp]:
    app = OrchestratorApp(
        OrchestratorConfig(
            listen="127.0.0.1:0",
            tls=keys.tls(),
            token_secret=str(keys.secret),
            groups=(GroupConfig(id="pool"),),
            stop_grace=0.2,
        )
    )
    await app.start()
    yield app
    await app.stop()


async def test_where_clients_get_any_free_port_agents_do_too(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one after it may be in use: half of all connections of the machine have one like it."""
    asked, listen = list[str](), app_module._listen

    def noted(where: str, add_port: Callable[[str], int]) -> str:
        asked.append(where)
        return listen(where, add_port)

    monkeypatch.setattr(app_module, "_listen", noted)
    config = OrchestratorConfig(listen="127.0.0.1:0", tls=keys.tls(), token_secret=str(keys.secret))
    app = OrchestratorApp(config)
    await app.start()
    await app.stop()
    assert asked == ["127.0.0.1:0", "127.0.0.1:0"]
    assert agents_address(replace(config, listen="127.0.0.1:50051")) == "127.0.0.1:50052"


class Caller:
    """Calls with some credentials."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address, self.credentials = address, credentials

    async def __aenter__(self) -> "Caller":
        self.channel = self.credentials.aio_channel(self.address)
        self.stub: Any = rpc.OrchestratorStub(self.channel)
        self.agent: Any = rpc.AgentStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return self.credentials.metadata(self.address)

    async def status(self, method: str, request: Any, *, agent: bool = False) -> grpc.StatusCode:
        call = getattr(self.agent if agent else self.stub, method)
        try:
            await call(request, timeout=BOUND, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def hello(self, job: str) -> pb.ServerMessage:
        stream = self.stub.Session(metadata=self.metadata)
        await stream.write(pb.ClientMessage(hello=pb.Hello(job=job, incarnation="i", session="s" + job)))
        try:
            return await stream.read()
        finally:
            stream.cancel()


async def attach(address: str, credentials: Credentials, node: str) -> str:
    """An agent's hello: ``welcome``, or the status that it ends with."""
    async with credentials.aio_channel(address) as channel:
        stream: Any = rpc.OrchestratorStub(channel).Attach(metadata=credentials.metadata(address))
        try:
            await stream.write(pb.AgentMessage(hello=pb.AgentHello(node=node, instance="one")))
            return str((await stream.read()).WhichOneof("kind"))
        except grpc.aio.AioRpcError as error:
            return error.code().name
        finally:
            stream.cancel()


# ── tokens ─────────────────────────────────────────────────────────────────


def test_a_token_says_what_it_was_made_for_and_cannot_be_changed() -> None:
    key, other = b"k" * 32, b"o" * 32
    token = tokens.mint(key, role="job", name="a", expires=100.0)
    claims = tokens.verify((other, key), token, now=99.0)
    assert (claims.role, claims.name) == ("job", "a")
    for bad in (
        tokens.mint(other, role="job", name="a", expires=100.0),
        token[:-2] + ("AA" if token[-2:] != "AA" else "BB"),
        token.replace(".", ".x", 1),
        token + "=",
        "coslice1..",
        "",
        "coslice1." + "A" * 5000 + ".A",
        "coslice1.ÿ.ÿ",
    ):
        with pytest.raises(tokens.InvalidToken) as caught:
            tokens.verify((key,), bad, now=99.0)
        assert not bad or bad not in str(caught.value)
    with pytest.raises(tokens.InvalidToken, match="expired"):
        tokens.verify((key,), token, now=100.0)


def test_what_makes_no_sense_is_refused_with_the_next_step(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with pytest.raises(ConfigError, match="coslice token secret"):
        make_token("a", secret=None, role="job", ttl="1h")
    tokens.create_secret(secret)
    for name, role, ttl, word in (
        ("", "job", "1h", "name it"),
        ("a/b", "job", "1h", "job name"),
        ("a", "admin", "1h", "leave"),
        ("a", "king", "1h", "choose one"),
        ("a", "job", "soon", "30d"),
    ):
        with pytest.raises(ConfigError, match=word):
            make_token(name, secret=secret, role=role, ttl=ttl)
    secret.write_text("short\n")
    with pytest.raises(ConfigError, match="coslice token secret"):
        make_token("a", secret=secret, role="job", ttl="1h")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        make_token("a", secret=secret, role="job", ttl="1h")


def test_a_token_is_not_sent_in_the_clear() -> None:
    credentials = credentials_from({"COSLICE_TOKEN": "coslice1.a.b"})
    assert credentials.metadata("127.0.0.1:1") == (("authorization", "Bearer coslice1.a.b"),)
    with pytest.raises(ConfigError, match="COSLICE_TLS_CA"):
        credentials.metadata("10.0.0.1:1")
    assert "coslice1" not in repr(credentials)


# ── listening ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051", "10.1.2.3:50051"])
async def test_beyond_loopback_tls_and_tokens_are_demanded(listen: str, keys: Keys, tmp_path: Path) -> None:
    tls, secret = keys.tls(), str(keys.secret)
    for given, flags in (
        ({}, ("--tls-cert", "--tls-key", "--tls-ca", "--token-secret", "--insecure")),
        ({"tls": tls}, ("--token-secret",)),
        ({"token_secret": secret}, ("--tls-cert",)),
    ):
        folder = str(tmp_path)
        agent = AgentConfig(
            node=NodeId("n1"), state_dir=folder, runtime_dir=folder, host_budget=1, listen=listen, **given
        )
        for refused in (
            lambda given=given: check(OrchestratorConfig(listen=listen, **given)),
            lambda given=given: check(
                OrchestratorConfig(listen="127.0.0.1:0", listen_agents=listen, **given)
            ),
        ):
            with pytest.raises(ConfigError) as caught:
                refused()
            assert all(flag in str(caught.value) for flag in flags)
        with pytest.raises(ConfigError, match=flags[0]):
            await AgentApp(agent).start()
    check(OrchestratorConfig(listen=listen, tls=tls, token_secret=secret))
    check(OrchestratorConfig(listen=listen, insecure=True))


def test_half_of_tls_is_no_tls() -> None:
    assert make_tls(None, None, None) is None
    with pytest.raises(ConfigError, match="missing: --tls-ca"):
        make_tls("c", "k", None)


def test_a_key_that_others_can_read_is_refused(keys: Keys, tmp_path: Path) -> None:
    key = tmp_path / "server.key"
    shutil.copy(keys.folder / "server.key", key)
    key.chmod(0o644)
    tls = Tls(str(keys.folder / "server.pem"), str(key), str(keys.folder / "ca.pem"))
    with pytest.raises(ConfigError, match="chmod 600"):
        check(OrchestratorConfig(tls=tls))


# ── the orchestrator ───────────────────────────────────────────────────────


async def test_a_jobs_token_speaks_for_that_job_only(secured: OrchestratorApp, keys: Keys) -> None:
    async with Caller(secured.address, keys.caller(keys.token("job-a"))) as caller:
        assert (await caller.hello("job-a")).HasField("welcome")
        stolen = (await caller.hello("job-b")).refused
        assert (stolen.code, "job-a" in stolen.message) == (pb.DENIED, True)
        assert await caller.status("GetStatus", pb.GetStatusRequest()) is grpc.StatusCode.OK
        forget = await caller.status("Forget", pb.ForgetRequest())
        assert forget is grpc.StatusCode.PERMISSION_DENIED
    async with Caller(secured.address, keys.caller(keys.token(role="read"))) as caller:
        assert (await caller.hello("job-a")).refused.code == pb.DENIED
        assert await caller.status("GetStatus", pb.GetStatusRequest()) is grpc.StatusCode.OK
    async with Caller(secured.address, keys.caller(keys.token(role="admin"))) as caller:
        assert (await caller.hello("job-a")).HasField("welcome")
        assert await caller.status("Forget", pb.ForgetRequest()) not in (
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.UNAUTHENTICATED,
        )


@pytest.mark.parametrize("token", ["", "guess", "coslice1.e30.AAAA"])
async def test_without_a_valid_token_nothing_is_answered(
    secured: OrchestratorApp, keys: Keys, token: str
) -> None:
    async with Caller(secured.address, keys.caller(token)) as caller:
        refused = (await caller.hello("job-a")).refused
        assert refused.code == pb.DENIED
        assert "coslice token create" in refused.message or "not accepted" in refused.message
        for method, request in (
            ("GetStatus", pb.GetStatusRequest()),
            ("Explain", pb.ExplainRequest(group="pool")),
            ("Forget", pb.ForgetRequest()),
            ("Drain", pb.DrainRequest(node="n0")),
        ):
            assert await caller.status(method, request) is grpc.StatusCode.UNAUTHENTICATED


async def test_an_expired_token_is_none(secured: OrchestratorApp, keys: Keys) -> None:
    (key, *_) = tokens.read_keys(keys.secret)
    old = tokens.mint(key, role="job", name="job-a", expires=time.time() - 1)
    async with Caller(secured.address, keys.caller(old)) as caller:
        assert "expired" in (await caller.hello("job-a")).refused.message


async def test_only_a_client_that_trusts_the_ca_connects(secured: OrchestratorApp, keys: Keys) -> None:
    others = keys.folder.parent / "others" / "ca.pem"
    for credentials in (Credentials(), Credentials(ca=str(others), token=keys.token("job-a"))):
        async with Caller(secured.address, credentials) as caller:
            assert await caller.status("GetStatus", pb.GetStatusRequest()) is grpc.StatusCode.UNAVAILABLE


async def test_an_agent_shows_a_certificate_of_its_node(secured: OrchestratorApp, keys: Keys) -> None:
    agents, admin = secured.agents_address, keys.token(role="admin")
    assert agents != secured.address
    assert await attach(agents, keys.caller(cert="n1"), "n1") == "welcome"
    assert await attach(agents, keys.caller(cert="n1"), "n2") == "PERMISSION_DENIED"
    assert await attach(agents, keys.caller(admin), "n1") == "UNAVAILABLE"  # no certificate, no handshake
    stranger = keys.folder.parent / "others" / "n1"
    forged = Credentials(ca=str(keys.folder / "ca.pem"), cert=f"{stranger}.pem", key=f"{stranger}.key")
    assert await attach(agents, forged, "n1") == "UNAVAILABLE"
    for token in ("", keys.token("job-a"), admin):
        assert await attach(secured.address, keys.caller(token), "n1") == "PERMISSION_DENIED"


@pytest.mark.parametrize("length", [59, 61, 64, 200])
async def test_a_long_name_is_no_certificate_for_its_beginning(
    secured: OrchestratorApp, keys: Keys, length: int
) -> None:
    """A common name has room for 64 characters."""
    expected = "welcome" if length == len(LONG) else "PERMISSION_DENIED"
    assert await attach(secured.agents_address, keys.caller(cert=LONG), LONG[:length]) == expected


def test_a_node_whose_certificate_would_have_too_long_a_file_name_is_told_before_anything_is_made(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "certs"
    with pytest.raises(ConfigError, match="has room for 251"):
        make_certs(folder, names=("localhost",), nodes=("n" * 252,))
    assert not folder.exists()


async def test_without_tls_an_agent_shows_its_nodes_token(keys: Keys) -> None:
    app = OrchestratorApp(
        OrchestratorConfig(listen="127.0.0.1:0", token_secret=str(keys.secret), stop_grace=0.2)
    )
    await app.start()
    try:
        for token, expected in (
            ("", "PERMISSION_DENIED"),
            (keys.token("job-a"), "PERMISSION_DENIED"),
            (keys.token("n2", "agent"), "PERMISSION_DENIED"),
            (keys.token("n1", "agent"), "welcome"),
        ):
            assert await attach(app.address, Credentials(token=token), "n1") == expected
    finally:
        await app.stop()


async def test_a_real_client_takes_turns_over_tls(
    secured: OrchestratorApp, keys: Keys, tmp_path: Path
) -> None:
    """Both transports, with the settings of the environment, against an agent with a certificate."""
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(keys.token("job-a"))
    env = {
        "COSLICE_ORCHESTRATOR": secured.address,
        "COSLICE_JOB": "job-a",
        "COSLICE_GROUP": "pool",
        "COSLICE_INCARNATION": "one",
        "COSLICE_TLS_CA": str(keys.folder / "ca.pem"),
        "COSLICE_TOKEN_FILE": str(file),
    }
    async with AsyncExitStack() as stack:
        agent = FakeAgent(
            secured.agents_address, node="n1", groups=("pool",), credentials=keys.caller(cert="n1")
        )
        await stack.enter_async_context(agent)
        client = coslice.AsyncClient.from_env(env)
        async with client.on_accelerators():
            assert (await client.status()).groups[0].job == "job-a"
        await client.close()
        thief = coslice.AsyncClient.from_env(env | {"COSLICE_JOB": "job-b"})
        with pytest.raises(Denied, match="job-a"):
            await thief.acquire()
        await thief.close()
        blind = coslice.AsyncClient.from_env(env | {"COSLICE_TLS_CA": str(tmp_path / "none.pem")})
        with pytest.raises(ConfigError, match=r"none\.pem"):
            await blind.acquire()
        await blind.close()


# ── the agent ──────────────────────────────────────────────────────────────


async def test_the_agent_asks_for_tokens_too(node: Node, keys: Keys) -> None:
    agent = await node.start(token_secret=str(keys.secret))
    job, admin = Credentials(token=keys.token("job-a")), Credentials(token=keys.token(role="admin"))
    async with Caller(agent.address, Credentials()) as caller:
        status = await caller.status("GetNodeStatus", pb.GetNodeStatusRequest(), agent=True)
        assert status is grpc.StatusCode.UNAUTHENTICATED
        move = await caller.status("Snapshot", pb.SnapshotRequest(job="job-a"), agent=True)
        assert move is grpc.StatusCode.PERMISSION_DENIED
    process = await node.workload("job-a", "--token", job.token, size=MIB, group="")
    denied = await node.workload("job-b", "--token", job.token, size=MIB, group="", wait=False)
    assert (await denied.until("refused"))["code"] == "DENIED"
    async with Caller(agent.address, job) as caller:
        for request, expected in (
            (pb.SnapshotRequest(job="job-a", pids=[process.pid]), grpc.StatusCode.PERMISSION_DENIED),
            (pb.SnapshotRequest(job="job-b"), grpc.StatusCode.PERMISSION_DENIED),
            (pb.SnapshotRequest(job="job-a"), grpc.StatusCode.OK),
        ):
            assert await caller.status("Snapshot", request, agent=True) is expected
        assert (
            await caller.status("Restore", pb.RestoreRequest(job="job-a"), agent=True) is grpc.StatusCode.OK
        )
    async with Caller(agent.address, admin) as caller:
        stranger = pb.SnapshotRequest(job="job-a", pids=[1])
        assert await caller.status("Snapshot", stranger, agent=True) is grpc.StatusCode.FAILED_PRECONDITION
        named = pb.SnapshotRequest(job="job-a", pids=[process.pid])
        assert await caller.status("Snapshot", named, agent=True) is grpc.StatusCode.OK


async def test_without_tokens_there_is_no_administrator(node: Node) -> None:
    """S1: any local caller could freeze any process."""
    agent = await node.start()
    await node.workload("job-a", size=MIB, group="")
    async with Caller(agent.address, Credentials()) as caller:
        for pid in (1, node.processes[0].pid):
            request = pb.SnapshotRequest(job="job-a", pids=[pid])
            assert await caller.status("Snapshot", request, agent=True) is grpc.StatusCode.PERMISSION_DENIED


async def test_without_a_secret_everything_local_works_as_before(world: World) -> None:
    await world.start()
    await world.agent()
    client = await world.client("job-a")
    await client.yielded(await client.acquire("pool"))
