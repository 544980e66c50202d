"""Registers `support/suite_plugin`: hooks and fixtures, which the tests of the bench share."""

import pytest
import suite_plugin


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(suite_plugin):
        config.pluginmanager.register(suite_plugin)
