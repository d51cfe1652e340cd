"""Form with images: what `POST /datasets/{id}` takes as multipart/form-data (RFC 7578)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, open_regular


def write_form(
    file: BinaryIO, changes: Sequence[Mapping[str, Any]], files: Mapping[str, str | os.PathLike[str]]
) -> str:
    """Writes a form with a part `changes` and a part for each image; returns its Content-Type.

    Args:
        files: path by name of the sample.

    Raises:
        UsageError: a file cannot be read, or a name cannot be written.
    """
    # 128 random bits, which no image holds.
    boundary = secrets.token_hex(16)
    if changes:
        head = 'Content-Disposition: form-data; name="changes"\r\nContent-Type: application/json\r\n\r\n'
        file.write(f"--{boundary}\r\n{head}{json.dumps(list(changes))}\r\n".encode())
    for sample, path in files.items():
        # A line end would begin another header, and half of a surrogate pair is no UTF-8.
        if not sample.isprintable():
            what = f"{sample!r:.120} cannot be the name of a sample"
            raise UsageError(what, where=os.fspath(path), fix="Give it a name without control characters.")
        quoted = sample.replace("\\", "\\\\").replace('"', '\\"')
        head = f'Content-Disposition: form-data; name="image"; filename="{quoted}"\r\n\r\n'
        file.write(f"--{boundary}\r\n{head}".encode())
        try:
            with open_regular(path) as image:
                shutil.copyfileobj(image, file)
        except OSError as error:
            raise UsageError(describe_os_error(error), where=os.fspath(path), fix="Leave it out.") from error
        file.write(b"\r\n")
    file.write(f"--{boundary}--\r\n".encode())
    return f'multipart/form-data; boundary="{boundary}"'
