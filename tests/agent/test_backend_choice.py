"""Which backend moves a job: the order, and that nothing malformed falls through it."""

import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from agent.process_world import lone_member, node_context

from coslice.agent.backends.base import (
    Capabilities,
    Defaults,
    MoveError,
    NodeContext,
    Presence,
    Restored,
    Snapshotted,
)
from coslice.agent.backends.resolve import Backends, installed, parse_backend, parse_backends
from coslice.agent.members import Member, OpenChannel
from coslice.errors import ConfigError
from coslice.store import make_store


class Recorded(Defaults):
    """Notes what it is asked for."""

    def __init__(self, name: str) -> None:
        self.name, self.asked, self.parked = name, list[str](), set[str]()
        self.started = 0

    def capabilities(self) -> Capabilities:
        return Capabilities(name=self.name)

    async def start(self) -> None:
        self.started += 1

    async def snapshot(
        self, members: Sequence[Member], *, op: str, mode: str = "offload", tags: Sequence[str] = ()
    ) -> Snapshotted:
        self.asked.append(op)
        self.parked |= {member.id for member in members}
        return Snapshotted(bytes=1, residual=0, seconds=0.1)

    async def restore(self, members: Sequence[Member], *, op: str) -> Restored:
        self.asked.append(op)
        self.parked -= {member.id for member in members}
        return Restored(bytes=1, seconds=0.1)

    async def probe(self, members: Sequence[Member]) -> Presence:
        return Presence(live=1, parked=0, device_bytes=0)

    def holds(self, members: Sequence[Member]) -> bool:
        return any(member.id in self.parked for member in members)


class Node:
    def __init__(self, context: NodeContext) -> None:
        self.context = context
        self.made: dict[str, Recorded] = {}

    def factory(self, name: str) -> "object":
        def make(node: NodeContext, settings: Mapping[str, object]) -> Recorded:
            if "bad" in settings:
                raise ConfigError(f"backend {name}: bad is no setting")
            self.made[name] = Recorded(name)
            return self.made[name]

        return make

    def backends(self, **options: object) -> Backends:
        names = ("app_channel", "freezer", "engine")
        factories = {name: self.factory(name) for name in names}
        return Backends(self.context, factories=factories, **options)  # type: ignore[arg-type]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    store = make_store(":memory:")
    yield Node(node_context(tmp_path, store, await store.load()))
    await store.close()


@pytest.fixture
def member() -> Member:
    import os

    made = lone_member("a", os.getpid(), backend="")
    made.device = "host"
    return made


def live(member: Member) -> Member:
    member.state_bytes = 100
    member.attach(OpenChannel())
    return member


async def test_the_request_comes_first(node: Node, member: Member) -> None:
    backends = node.backends(default="engine")
    member.backend = "freezer"
    await backends.snapshot([live(member)], op="1", backend="engine")
    assert node.made["engine"].asked == ["1"]


async def test_then_a_live_channel_with_state(node: Node, member: Member) -> None:
    backends = node.backends(default="engine")
    member.backend = "freezer"
    await backends.snapshot([live(member)], op="1")
    assert node.made["app_channel"].asked == ["1"]


async def test_then_the_jobs_own_configuration(node: Node, member: Member) -> None:
    backends = node.backends(default="engine")
    member.backend = "freezer"
    await backends.snapshot([member], op="1")
    assert node.made["freezer"].asked == ["1"]


async def test_then_the_nodes_default(node: Node, member: Member) -> None:
    backends = node.backends(default="engine")
    await backends.snapshot([member], op="1")
    assert node.made["engine"].asked == ["1"]


async def test_who_parked_it_brings_it_back(node: Node, member: Member) -> None:
    backends = node.backends(default="engine")
    await backends.snapshot([member], op="1", backend="freezer")
    await backends.restore([live(member)], op="2")
    assert node.made["freezer"].asked == ["1", "2"]
    await backends.snapshot([member], op="3", backend="freezer")
    with pytest.raises(MoveError, match="only it can restore"):
        await backends.snapshot([member], op="4", backend="engine")


async def test_nothing_malformed_falls_through(node: Node, member: Member) -> None:
    backends = node.backends(default="engine")
    with pytest.raises(MoveError, match="no backend 'magic'; installed are: app_channel, engine, freezer"):
        await backends.snapshot([member], op="1", backend="magic")
    member.backend = "magic"
    with pytest.raises(MoveError, match="no backend 'magic'"):
        await backends.snapshot([member], op="2")
    with pytest.raises(ConfigError, match="no settings for jobs"):
        backends.check_job("freezer:speed=1")
    with pytest.raises(ConfigError, match="no backend 'magic'"):
        backends.check_job("magic")
    assert [made.asked for made in node.made.values()] == [[]] * len(node.made)


def test_a_node_with_a_malformed_configuration_does_not_start(node: Node) -> None:
    with pytest.raises(ConfigError, match="no backend 'magic'"):
        node.backends(default="magic")
    with pytest.raises(ConfigError, match="bad is no setting"):
        node.backends(settings={"freezer": {"bad": "1"}})


async def test_processes_of_a_job_that_disagree_are_an_error(node: Node, member: Member) -> None:
    import os

    other = lone_member("a", os.getppid(), backend="engine")
    member.backend = "freezer"
    with pytest.raises(MoveError, match=r"different backends \(engine, freezer\)"):
        await node.backends().snapshot([member, other], op="1")


async def test_each_is_started_once_before_it_is_used(node: Node, member: Member) -> None:
    backends = node.backends(default="engine")
    await backends.start()
    await backends.snapshot([member], op="1")
    await backends.restore([member], op="2")
    await backends.snapshot([member], op="3", backend="freezer")
    assert {name: made.started for name, made in node.made.items()} == {
        "app_channel": 1,
        "engine": 1,
        "freezer": 1,
    }


async def test_what_an_earlier_agent_parked_is_known_at_once(tmp_path: Path) -> None:
    store = make_store(":memory:")
    found = {"backend/freezer/parked": (b"{}", 1)}
    node = Node(node_context(tmp_path, store, found))
    node.backends()
    assert "freezer" in node.made
    await store.close()


def test_specifications() -> None:
    spec = parse_backend("cuda:lock_timeout=5, remap=GPU-a=GPU-b")
    assert (spec.name, spec.settings) == ("cuda", {"lock_timeout": "5", "remap": "GPU-a=GPU-b"})
    assert parse_backend("app_endpoint:url=http://127.0.0.1:8000").settings["url"] == "http://127.0.0.1:8000"
    for text in ("", ":a=1", "cuda:", "cuda:a", "cuda:a=", "cuda:=1", "cuda:a=1,a=2"):
        with pytest.raises(ConfigError, match="backend"):
            parse_backend(text)


def test_the_backends_of_this_package_are_installed() -> None:
    assert {"app_channel", "cuda", "tpu"} <= installed().keys()


def test_a_backend_is_named_once() -> None:
    assert [spec.name for spec in parse_backends(["app_channel", "cuda:tries=2"])] == ["app_channel", "cuda"]
    with pytest.raises(ConfigError, match="cuda twice"):
        parse_backends(["cuda:tries=2", "app_channel", "cuda"])


PAGE = Path(__file__).parents[2] / "docs" / "adding-a-backend.md"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's own package, as if it were installed, with entry points that are wrong in their own ways."""
    toml, python, *_ = re.findall(r"```(?:toml|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (mine,) = re.findall(r'^mine = "(.*)"$', toml, re.MULTILINE)
    points = {
        "mine": mine,
        "absent": "my_package.nowhere:make",
        "raises": "my_package.raises:make",
        "fails": "my_package.odd:fails",
        "half": "my_package.odd:half",
        "cuda": "my_package.backend:make",
    }
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    files = {
        "my_package/__init__.py": "",
        "my_package/backend.py": python,
        "my_package/raises.py": "raise OSError('no such device')",
        "my_package/odd.py": "def fails(node, settings): return 1 / 0\ndef half(node, settings): return node",
        "my_package-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-package\nVersion: 1\n",
        "my_package-1.dist-info/entry_points.txt": f"[coslice.backends]\n{lines}",
    }
    for name, text in files.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


async def test_the_example_of_the_page_is_found_and_checked(package: Path, node: Node) -> None:
    made = Backends(node.context, default="mine", settings={"mine": {"slowest": "1e9"}})
    assert made.capabilities().name == "mine"
    for value in ("nan", "-1", "0", "fast"):
        with pytest.raises(ConfigError, match=r"backend mine: .*slowest"):
            Backends(node.context, default="mine", settings={"mine": {"slowest": value}})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "cannot be loaded: ModuleNotFoundError"),
        ("raises", r"cannot be loaded: OSError: no such device"),
        ("fails", "cannot be made: ZeroDivisionError"),
        ("half", r"has no capabilities, .*adding-a-backend"),
        ("cuda", r"more than once \(coslice.agent.backends.cuda:make, my_package.backend:make\)"),
    ],
)
async def test_what_is_wrong_with_a_package_is_said_at_once(
    name: str, words: str, package: Path, node: Node
) -> None:
    with pytest.raises(ConfigError, match=words):
        Backends(node.context, default=name)
