"""Addresses as users write them, and which of them only this machine reaches."""

from __future__ import annotations

import pytest

from headway.core.errors import UsageError
from headway.http.listening import Address, is_loopback


def test_addresses() -> None:
    assert Address.parse("127.0.0.1:80") == Address(host="127.0.0.1", port=80)
    assert Address.parse("127.0.0.1") == Address(host="127.0.0.1", port=8080)
    assert Address.parse("[::1]:80") == Address(host="::1", port=80)
    assert Address.parse("::1") == Address(host="::1", port=8080)
    assert Address.parse("[::1]").url_host == "[::1]"
    with pytest.raises(UsageError, match=r"a port alone\. Write for example 127\.0\.0\.1:8081\."):
        Address.parse("8081")
    for host, expected in (
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
    ):
        assert is_loopback(host) is expected
    for host in ("::", "10.0.0.1", "example.com", "localhost.example.com", "127.0.0.1.example.com"):
        assert not is_loopback(host)
