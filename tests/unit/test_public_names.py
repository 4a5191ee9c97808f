"""What users import: `downrange` and `downrange.errors`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import downrange
import downrange.errors
from downrange.model.errors import MQError

# Errors that no call of a client raises: they are caught inside, or belong to servers, to Spark or to the command line.
INSIDE = {
    "BodyError", "FieldError", "HandleError", "JavaJsonError", "SealError", "NoQueue", "CorruptRecord",
}  # fmt: skip


def test_every_public_name_can_be_imported_and_is_documented() -> None:
    public = [getattr(module, name) for module in (downrange, downrange.errors) for name in module.__all__]
    assert [value for value in public if not value.__doc__] == []


def test_all_methods_of_public_classes_are_documented() -> None:
    """A method with the name of one in a documented base class needs no text of its own."""
    undocumented = []
    for name in downrange.__all__:
        value = getattr(downrange, name)
        if not inspect.isclass(value) or issubclass(value, Exception):
            continue
        for attribute, member in vars(value).items():
            is_method = inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
            if is_method and not attribute.startswith("_") and not inspect.getdoc(getattr(value, attribute)):
                undocumented.append(f"{name}.{attribute}")
    assert undocumented == []


@pytest.mark.parametrize(
    "name",
    [
        "NoRoute", "NoNameServer", "BodyTooLarge", "InvalidTopic", "ConfigError", "ClientClosed", "TooManySends",
        "BrokerError", "CommitFailed", "NotARequest",
    ],
)  # fmt: skip
def test_errors_are_reachable_from_the_top(name: str) -> None:
    assert getattr(downrange, name) is getattr(downrange.errors, name)
    assert issubclass(getattr(downrange, name), MQError)


def test_all_errors_of_a_client_are_in_one_place() -> None:
    import downrange.client
    import downrange.protocol
    import downrange.transport

    found = set()
    for package in (downrange.client, downrange.protocol, downrange.transport):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if inspect.isclass(value) and issubclass(value, MQError) and value.__module__.startswith("downrange"):
                    found.add(name)
    assert found - set(downrange.errors.__all__) - INSIDE == set()
    assert all(issubclass(getattr(downrange.errors, name), MQError) for name in downrange.errors.__all__)
