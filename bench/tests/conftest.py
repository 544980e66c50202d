"""Registers `tests/support/suite_plugin`: the hooks and fixtures of all tests."""

import pytest
import suite_plugin


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(suite_plugin):
        config.pluginmanager.register(suite_plugin)
