"""The public surface: what users may rely on, and nothing by accident."""

import importlib

import pytest

import coslice

PUBLIC = """
AcquireTimeout AsyncClient Client ConfigError CosliceError Denied Grant GroupEmpty GroupGone GroupStatus
JobFaulted JobRunning Lease LeaseError LeaseLost LimitReached LockOrder NoRoom NodeLost NotAdmitted NotHeld
OperationFailed OrchestratorUnreachable Refused StaleLease StateBusy StateError StateLost
StateOffloaded Status UnknownGroup Waiter connect workload
"""


def test_the_surface_is_locked() -> None:
    assert sorted(coslice.__all__) == sorted(PUBLIC.split())


def test_everything_public_is_there() -> None:
    for name in coslice.__all__:
        assert getattr(coslice, name) is not None


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        coslice.nonsense  # noqa: B018


def test_every_public_error_is_a_coslice_error() -> None:
    errors = importlib.import_module("coslice.errors")
    named = {name for name, kind in vars(errors).items() if isinstance(kind, type) and name[0].isupper()}
    named -= {"Mapping"}
    assert named <= set(coslice.__all__)
    assert all(issubclass(getattr(errors, name), coslice.CosliceError) for name in named)
