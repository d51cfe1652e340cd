"""Predicts image files with the network in this folder. It needs neither PyTorch nor Headway.

pip install numpy onnxruntime pillow
python predict.py cat.jpg dog.png > predictions.csv
"""

import argparse
import csv
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import onnxruntime
    from PIL import Image
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed here. Install it: pip install numpy onnxruntime pillow")

FOLDER, BATCH = Path(__file__).resolve().parent, 32


def read_file(name: str, files: dict[str, str] | None = None) -> bytes:
    """Returns the bytes of a file in this folder, if they have the sha256 that `files` gives."""
    try:
        data = (FOLDER / name).read_bytes()
    except OSError as error:
        sys.exit(f"{FOLDER / name}: this file cannot be read ({error.strerror}). Copy the whole folder again.")
    if files is not None and hashlib.sha256(data).hexdigest() != files[name]:
        sys.exit(f"{FOLDER / name}: this is not the file that was exported. Copy the whole folder again.")
    return data


def read_manifest() -> dict[str, Any]:
    """Returns pipeline.json. One of its entries is the sha256 of all others."""
    try:
        manifest: dict[str, Any] = json.loads(read_file("pipeline.json"))
        expected = manifest.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError):
        expected, manifest = "", {}
    if hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() != expected:
        sys.exit(f"{FOLDER / 'pipeline.json'}: this is not the file that was exported. Copy the whole folder again.")
    return manifest


def open_network(name: str, manifest: dict[str, Any]) -> Callable[[Any], Any]:
    """Loads an ONNX file, and returns the function that it computes."""
    session = onnxruntime.InferenceSession(read_file(name, manifest["files"]), providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"pixels": pixels})[0]


def convert(image: Any, channels: int) -> Any:
    """Converts an image to gray (1 channel) or RGB (3), 8 bits each; transparency is dropped."""
    # Of 16-bit gray the high byte counts.
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("L" if channels == 1 else "RGB")


def read_pixels(path: str, manifest: dict[str, Any], resize: Callable[[Any], Any]) -> Any:
    """Decodes, crops and resizes an image to uint8 [1, H, W, C]. Like training, it ignores the EXIF orientation."""
    (height, width), channels, scale = manifest["size"], manifest["channels"], 1
    image: Any = Image.open(path, formats=["JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF"])
    w, h = image.size
    if manifest["scaled"] and image.format == "JPEG":
        # Like training: decoded at 1/2, 1/4 or 1/8, as long as the crop keeps the pixels that the network needs.
        crop = np.array([min(w, h * width / height), min(h, w * height / width)], np.float32)
        crop *= np.float32(manifest["crop_share"])
        while scale < 8 and (crop >= np.multiply(2 * scale, (width, height))).all():
            scale *= 2
    if scale == 1:
        return resize(np.asarray(convert(image, channels)).reshape(1, h, w, channels))
    image.draft(None, (w // scale, h // scale))
    # The sides of this crop need not be whole pixels, which resize.onnx takes for an image of its own.
    box = [float(side) / scale for side in (*(np.array([w, h]) - crop) / 2, *(np.array([w, h]) + crop) / 2)]
    image = convert(image, channels).resize((width, height), Image.Resampling.BILINEAR, box=box)
    return np.asarray(image).reshape(1, height, width, channels)


def make_row(outputs: Any, manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of one image: the best class, the labels above the threshold, or numbers."""
    named = dict(zip(manifest["names"], map(float, outputs), strict=True))
    if manifest["activation"] == "softmax":
        return {"label": manifest["names"][outputs.argmax()], "probability": round(float(outputs.max()), 6)}
    if manifest["activation"] == "sigmoid":
        labels = ";".join(name for name, value in named.items() if value > manifest["threshold"])
        return {"labels": labels} | {f"probability_{name}": round(value, 6) for name, value in named.items()}
    return named


def main(paths: list[str], target: str) -> None:
    """Prints one line of CSV for each image file."""
    manifest = read_manifest()
    if manifest["targets"].get(target, {"rejected": True})["rejected"]:
        sys.exit(f"{FOLDER}: its target {target} does not exist, or was rejected. pipeline.json has the reason.")
    model = manifest["targets"][target]["file"]
    resize, predict = open_network("resize.onnx", manifest), open_network(model, manifest)
    table: Any = None
    if folders := [path for path in paths if Path(path).is_dir()]:
        sys.exit(f"{folders[0]}: this is a folder. Name the files in it: {folders[0]}/*")
    for start in range(0, len(paths), BATCH):
        batch, pixels = paths[start : start + BATCH], []
        for path in batch:
            try:
                pixels.append(read_pixels(path, manifest, resize))
            # Pillow's readers raise errors of many classes.
            except Exception as error:
                sys.exit(f"{path}: this image cannot be read ({error}).")
        for path, outputs in zip(batch, predict(np.concatenate(pixels)), strict=True):
            row = {"path": path, **make_row(outputs, manifest)}
            if table is None:
                table = csv.DictWriter(sys.stdout, list(row), lineterminator="\n")
                table.writeheader()
            table.writerow(row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="onnx", choices=("onnx", "int8"), help="the network; default: onnx")
    parser.add_argument("images", nargs="+", help="image files")
    options = parser.parse_args()
    main(options.images, options.target)
