"""Settings: arguments before the environment, and errors that name the setting."""

import pytest

import coslice
from coslice.client.config import settings_from

FULL = {
    "COSLICE_ORCHESTRATOR": "127.0.0.1:50051",
    "COSLICE_JOB": "job-1",
    "COSLICE_GROUP": "b, a,b",
    "COSLICE_INCARNATION": "i-1",
    "COSLICE_NEED": "1024",
    "COSLICE_WORLD": "4",
    "COSLICE_PROFILE": "{}",
    "COSLICE_ACCELERATOR_CPUS": "2,3",
    "COSLICE_RANK": "1",
    "RANK": "7",
}


def test_the_environment_of_coslice_run() -> None:
    config = coslice.Client(**settings_from(FULL, {})).config
    assert (config.address, config.job, config.groups) == ("127.0.0.1:50051", "job-1", ("b", "a"))
    assert (config.incarnation, config.need, config.world, config.cpus, config.rank, config.profile) == (
        "i-1",
        1024,
        4,
        (2, 3),
        1,
        "{}",
    )


def test_arguments_come_first() -> None:
    client = coslice.Client.from_env(FULL, job="other", groups="c", cpus=())
    assert (client.config.job, client.config.groups) == ("other", ("c",))


def test_the_launchers_rank_is_the_fallback() -> None:
    assert settings_from({"RANK": "7"}, {})["rank"] == 7


def test_an_empty_environment_is_a_noop() -> None:
    assert coslice.Client.from_env({}).is_noop


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"COSLICE_WORLD": "four"}, "COSLICE_WORLD"),
        ({"COSLICE_NEED": "-1"}, "COSLICE_NEED"),
        ({"COSLICE_ACCELERATOR_CPUS": "0-3"}, "COSLICE_ACCELERATOR_CPUS"),
        ({"COSLICE_ORCHESTRATOR": "localhost", "COSLICE_JOB": "j"}, "COSLICE_ORCHESTRATOR"),
        ({"COSLICE_ORCHESTRATOR": "localhost:1"}, "COSLICE_JOB"),
    ],
)
def test_malformed_settings_are_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(coslice.ConfigError, match=named):
        coslice.Client.from_env(env)


def test_an_unknown_setting_names_the_known_ones() -> None:
    with pytest.raises(coslice.ConfigError, match=r"adress.*address"):
        coslice.connect(adress="x")
