"""The engine that a test runs on, and how many examples hypothesis draws."""

import pytest
from hypothesis import settings
from table import ENGINES, Engine

settings.register_profile("suite", deadline=None, database=None, print_blob=True)
settings.load_profile("suite")


@pytest.fixture(scope="session", params=ENGINES, ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.param
