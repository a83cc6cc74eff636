"""What the project asks pip for: the pins cover it and agree with it."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from looped.files import shipped
from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(pin.name): pin
    for pin in (
        Requirement(line) for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line[:1] != "#"
    )
}
# These pin what they ask for themselves.
PINNED = ("gpu", "fa3")
EXTRAS = {name: wants for name, wants in PROJECT["optional-dependencies"].items() if name not in PINNED}


@pytest.mark.parametrize(
    "text", sorted({*PROJECT["dependencies"], *(want for wants in EXTRAS.values() for want in wants)})
)
def test_every_requirement_is_pinned_to_a_version_it_allows(text: str) -> None:
    wanted = Requirement(text)
    (pin,) = PINS[canonicalize_name(wanted.name)].specifier
    assert pin.operator == "==" and wanted.specifier.contains(pin.version)


def test_shipped_folders_are_found() -> None:
    assert shipped("recipes").is_dir() and shipped("eval").is_dir()
