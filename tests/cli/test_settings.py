"""``--set``: a time or a limit by its name, or a clear no."""

from pathlib import Path

import pytest

from coslice.agent.config import AgentConfig
from coslice.cli.settings import applied, parse_settings, settable
from coslice.core.ids import NodeId
from coslice.errors import ConfigError
from coslice.orchestrator.config import OrchestratorConfig

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("max_hold=30m", "max_hold", 1800.0),
        ("session_grace=250ms", "session_grace", 0.25),
        ("max_hold = 2h", "max_hold", 7200.0),
        ("max_waiters=7", "max_waiters", 7),
        ("max_message_bytes=1MiB", "max_message_bytes", 1 << 20),
        ("on_overrun=warn", "on_overrun", "warn"),
    ],
)
def test_a_setting_is_taken(word: str, name: str, value: object) -> None:
    config = applied(OrchestratorConfig(), parse_settings([word], OrchestratorConfig))
    assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("max_hold", "write NAME=VALUE"),
        ("max_hold=", "write NAME=VALUE"),
        ("max_holt=3", "There are, with their defaults: "),
        ("listen=x", "there is no 'listen'"),
        ("max_hold=soon", "give seconds"),
        ("max_hold=-3", "give seconds"),
        ("max_waiters=1.5", "whole number"),
        ("on_overrun=shout", "choose one of evict, warn"),
        ("max_message_bytes=much", "is not a size"),
    ],
)
def test_a_mistake_is_one_clear_error(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        applied(OrchestratorConfig(), parse_settings([word], OrchestratorConfig))


def test_each_process_takes_its_own() -> None:
    settings = parse_settings(["retries=1", "max_hold=9"], OrchestratorConfig, AgentConfig)
    agent = AgentConfig(node=NodeId("n"), state_dir="s", runtime_dir="r", host_budget=1)
    assert applied(agent, settings).retries == 1
    assert applied(OrchestratorConfig(), settings).max_hold == 9.0
    with pytest.raises(ConfigError, match="twice"):
        parse_settings(["max_hold=1", "max_hold=2"], OrchestratorConfig)


def test_the_page_has_them_all() -> None:
    page = DOCS.read_text()
    names = {*settable(OrchestratorConfig), *settable(AgentConfig)}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
