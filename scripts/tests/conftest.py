"""Each test has an environment of its own, as unit tests have."""

from tests.unit.conftest import own_environment

__all__ = ["own_environment"]
