"""Addresses in messages: whatever a password holds, nothing of it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import refused

from headway.core.errors import DataError, UsageError
from headway.core.printable import hide_credentials
from headway.storage.addresses import expect_escaped, redact_url
from headway.storage.remote_folder import RemoteFolder

# With letters that are in no other part of the addresses.
PASSWORDS = st.text(st.sampled_from("XYZ/?#:@%&= \u00fc"), min_size=1).filter(
    lambda text: not {*text}.isdisjoint("XYZ")
)


@given(PASSWORDS, st.sampled_from(["", "XZ"]), st.sampled_from(["", "/p/q", "/p?sig=", "/run@2"]))
def test_no_part_of_a_password_is_shown(password: str, user: str, path: str) -> None:
    address = f"s3://{user}:{password}@host{path}"
    for shown in (
        redact_url(address),
        str(DataError(f"'{address}' is lost", where=f'"{address}"', fix=f"Look at {address.replace(' ', '%20')}.")),
    ):
        assert {*shown}.isdisjoint("XYZ")
        assert shown.startswith(("s3://", '"s3://***@'))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:secret@host/x?sig=secret", "https://host/x"),
        ("s3://bucket/photos/train", "s3://bucket/photos/train"),
        ("https://host:8080/run@2/x", "https://***@2/x"),
        ("https://host/x?mail=a@b&sig=secret", "https://***"),
        ("photos/a@b", "photos/a@b"),
        ("file:///home/ann@corp/run", "file:///home/ann@corp/run"),
    ],
)
def test_the_rest_of_an_address_is_shown(address: str, shown: str) -> None:
    assert redact_url(address) == shown


def test_what_is_no_password_stays() -> None:
    for text in (
        "file:///home/ann@corp/run is missing",
        "https://host/x is not ann@corp",
        "'https://host/x' is not 'ann@corp'",
        "a ://x@y",
        "\u00fc://x@y",
    ):
        assert hide_credentials(text) == text
    assert hide_credentials("read 'http://a b@c', http://d@e\nand s3+http://@f") == (
        "read 'http://***@c', http://***@e\nand s3+http://***@f"
    )


def test_a_password_that_is_not_escaped_is_refused() -> None:
    """Others would take its beginning for the port, and name that."""
    for address in ("http://me:12ab/cd@host/x", "sftp://me:ab?cd@host/x", "https://me:#@host"):
        with pytest.raises(UsageError, match="not escaped") as found:
            RemoteFolder(address)
        assert "ab" not in str(found.value)
        assert "cd" not in str(found.value)
    with pytest.raises(UsageError, match="has a space"):
        expect_escaped("https://me:ge heim@host/x")
    for address in ("http://host:80/x@2", "http://[::1]/x@2", "http://me:a%2Fb@host:80/x", "s3://bucket/x@2"):
        expect_escaped(address)


def test_a_recipe_that_names_a_password_is_refused_without_it(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.write_text("data: https://me:geheim/lang@host/x\nrecipe: recipe.yaml\n")
    said = refused("loop", loop, status=2)
    assert "https://***@host/x" in said
    assert "geheim" not in said
    assert "lang" not in said
