"""A plain server of a usual kind: FastAPI, Pillow, and eager PyTorch in `inference_mode` with one thread."""

from __future__ import annotations

import importlib.util
import io
import json
import socket
import sys
from typing import Any

import fastapi
import numpy as np
import torch
import uvicorn
from PIL import Image
from safetensors.torch import load_file


def load_network(asked: dict[str, Any]) -> torch.nn.Module:
    """The network of the export, built by the same file."""
    sys.path.insert(0, asked["source"])
    assert importlib.util.find_spec("headway") is not None
    from headway.model import cifar_resnet

    network = cifar_resnet(len(asked["names"]))
    network.load_state_dict(load_file(asked["weights"]))
    return network.eval()


def build_app(asked: dict[str, Any]) -> fastapi.FastAPI:
    torch.set_num_threads(1)
    network, names = load_network(asked), asked["names"]
    app = fastapi.FastAPI()

    # The body as it comes, and no thread pool: both are cheaper than UploadFile and `def`.
    @app.post("/predict")
    async def predict(request: fastapi.Request) -> dict[str, Any]:
        image = Image.open(io.BytesIO(await request.body())).convert("RGB")
        if image.size != (asked["side"], asked["side"]):
            image = image.resize((asked["side"], asked["side"]), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).unsqueeze(0).float()
        with torch.inference_mode():
            probabilities = network((pixels - asked["mean"]) / asked["deviation"]).softmax(dim=1)[0]
            best = int(probabilities.argmax())
        return {"label": names[best], "probability": round(float(probabilities[best]), 6)}

    return app


def main() -> None:
    asked = json.loads(sys.argv[1])
    app = build_app(asked)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    version = f"fastapi {fastapi.__version__}, uvicorn {uvicorn.__version__}, torch {torch.__version__}"
    print(json.dumps({"port": listener.getsockname()[1], "version": version}), flush=True)
    # uvloop and httptools, as `pip install 'uvicorn[standard]'` brings them.
    config = uvicorn.Config(app, loop="uvloop", http="httptools", access_log=False, log_level="error")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
