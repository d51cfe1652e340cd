"""Bodies of predictions: forms, images and pixels within limits; everything else is refused with a sentence."""

from __future__ import annotations

import pytest
from tests.export._served import build_form, encode

from headway.export.serve.inputs import check_media_type, parse_body
from headway.http.problems import ProblemError


def test_a_part_with_another_encoding_or_type_is_refused() -> None:
    body, content_type = build_form(("a.jpg", b"x"))
    encoded = body.replace(b"\r\n\r\nx", b"\r\nContent-Transfer-Encoding: base64\r\n\r\nx")
    typed = body.replace(b"image/jpeg", b"text/html")
    for one in (encoded, typed):
        with pytest.raises(ProblemError) as refused:
            parse_body("multipart/form-data", content_type, None, one, images=9, image_pixels=9, pixels=9)
        assert refused.value.status == 415


def test_more_images_than_allowed_are_refused() -> None:
    body, content_type = build_form(*[("a", encode(size=(9, 7)))] * 4)
    limits = {"images": 4, "image_pixels": 63, "pixels": 4 * 63}
    payload = parse_body("multipart/form-data", content_type, None, body, **limits)
    assert payload.sides == [(9, 7)] * 4
    assert payload.count_pixels() == 4 * 63
    for name, status in (("images", 413), ("image_pixels", 422), ("pixels", 413)):
        with pytest.raises(ProblemError) as refused:
            parse_body("multipart/form-data", content_type, None, body, **limits | {name: limits[name] - 1})
        assert refused.value.status == status


@pytest.mark.parametrize(
    ("shape", "length", "status"),
    [
        (None, 12, 400),
        ("2,3", 12, 400),
        ("1,2,2,3,1", 12, 400),
        ("-1,2,2,3", 12, 400),
        ("1,2,2,99999999", 12, 400),
        ("1,2,2,3", 11, 422),
        ("0,2,2,3", 0, 422),
        ("10,2,2,3", 120, 413),
    ],
)
def test_pixels_without_a_fitting_shape_are_refused(shape: str | None, length: int, status: int) -> None:
    with pytest.raises(ProblemError) as refused:
        parse_body("application/octet-stream", "", shape, bytes(length), images=9, image_pixels=99, pixels=99)
    assert refused.value.status == status


def test_pixels_have_the_shape_of_the_header() -> None:
    payload = parse_body(
        "application/octet-stream", "", " 2, 1,2,3", bytes(range(12)), images=9, image_pixels=99, pixels=99
    )
    assert payload.pixels is not None
    assert payload.pixels.shape == (2, 1, 2, 3)
    assert payload.pixels.reshape(-1).tolist() == list(range(12))
    assert list(payload.names) == ["image 0", "image 1"]


def test_media_types() -> None:
    assert check_media_type("Image/JPEG; q=1") == "image/jpeg"
    for wrong in ("", "text/html", "application/json", "image/svg+xml"):
        with pytest.raises(ProblemError) as refused:
            check_media_type(wrong)
        assert refused.value.status == 415
