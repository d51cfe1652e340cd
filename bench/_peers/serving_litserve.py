"""LitServe with ONNX Runtime on one thread, images as base64 in JSON, as its examples have it."""

from __future__ import annotations

import base64
import io
import json
import sys
from typing import Any

import litserve
import numpy as np
import onnxruntime
from PIL import Image


class Api(litserve.LitAPI):
    """The same graph that Headway serves."""

    def __init__(self, asked: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self.asked = asked

    def setup(self, device: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(self.asked["model"], options, ["CPUExecutionProvider"])

    def decode_request(self, request: dict[str, str]) -> Any:
        image = Image.open(io.BytesIO(base64.b64decode(request["image"]))).convert("RGB")
        side = self.asked["side"]
        return np.array(image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BILINEAR))

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def predict(self, pixels: Any) -> Any:
        return self.session.run(None, {"pixels": pixels if pixels.ndim == 4 else pixels[None]})[0]

    def unbatch(self, output: Any) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> dict[str, Any]:
        probabilities = output.reshape(-1)
        best = int(probabilities.argmax())
        return {"label": self.asked["names"][best], "probability": round(float(probabilities[best]), 6)}


def main() -> None:
    asked = json.loads(sys.argv[1])
    api = Api(asked, max_batch_size=asked["batch"], batch_timeout=0.0)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1)
    print(json.dumps({"port": asked["port"], "version": f"litserve {litserve.__version__}"}), flush=True)
    server.run(host="127.0.0.1", port=asked["port"], num_api_servers=1, log_level="error", generate_client_file=False)


if __name__ == "__main__":
    main()
