"""What tests of launchers and notebooks share."""

import os

import pytest


@pytest.fixture(scope="session")
def one_device():
    """XLA_FLAGS of a process with one device, as a user has, that compiles as these tests do."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if "device_count" not in flag)
