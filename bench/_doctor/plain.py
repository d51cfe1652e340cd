"""The same job in plain PyTorch (a Dataset, a DataLoader, a loop), for peers that examine such a loop.

The variable HEADWAY_BENCH_PLAIN holds {recipe, steps, seconds, out, watched} as JSON. `python -m`, torchrun, or a peer
that needs a script runs this file. With `watched` TraceML records the steps; otherwise torch's profiler does, and the
top rows of its summary are written to `out`.

Networks, transforms and tasks are the recipe's own. Images come from the same files and are decoded by Pillow in worker
processes, as many as the recipe has threads. Crops are centred and nothing is flipped.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

import headway
from headway.core.recipe import read_recipe
from headway.core.user_code import import_user_object
from headway.data.columns import FLAG_RAW
from headway.model.builder import build_model
from headway.setup.recipe import TrainRecipe
from headway.setup.task import TargetSpec, Task
from headway.setup.task_builder import build_task as build_task

ASKED = "HEADWAY_BENCH_PLAIN"
PACKAGES = ("traceml_ai", "traceml")
"""TraceML's, newer and older."""


@final
class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples of a data set, decoded one by one, square of `side` pixels; None: as large as they are."""

    def __init__(self, uri: str, side: int | None) -> None:
        self._uri, self._side = uri, side
        self._data: headway.Dataset | None = None
        with closing(headway.open(uri)) as found:
            self.classes, self._samples = found.classes, len(found)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        if self._data is None:  # each worker its own: files and connections are not shared
            self._data = headway.open(self._uri)
        data = self._data
        record = data.read([place])[0]
        if data.flags[place] & FLAG_RAW:
            pixels = np.frombuffer(record, np.uint8).reshape(int(data.height[place]), int(data.width[place]), -1)
            image = Image.fromarray(pixels.squeeze())
        else:
            image = Image.open(io.BytesIO(record))
        image = image.convert("RGB")
        if self._side is not None and image.size != (self._side, self._side):
            image = ImageOps.fit(image, (self._side, self._side))
        return torch.from_numpy(np.array(image)), int(data.label[place])


def main() -> None:
    asked = json.loads(os.environ[ASKED])
    loaded = read_recipe(Path(asked["recipe"]), (), TrainRecipe)
    recipe, ranks = loaded.recipe, int(os.environ.get("WORLD_SIZE", "1"))
    train = Images(recipe.data.train, recipe.data.size if isinstance(recipe.data.size, int) else None)
    held_out = Images(recipe.data.eval, None) if recipe.data.eval is not None else None
    with ExitStack() as stack:
        task = build_task(recipe.task, TargetSpec(kind="class", classes=train.classes, numbers=1), loaded.base)
        model: nn.Module = build_model(recipe.model, num_outputs=task.outputs, base=loaded.base)
        if ranks > 1:
            torch.distributed.init_process_group("gloo")
            stack.callback(torch.distributed.destroy_process_group)
            model = nn.parallel.DistributedDataParallel(model)
        transform = (
            import_user_object(recipe.transform, base=loaded.base, what="transform")
            if recipe.transform is not None
            else None
        )
        step = stepping(recipe, model, task, transform)
        every = max(1, round(recipe.evaluate.every_epochs * len(train) / recipe.batch)) if held_out is not None else 0
        saving, folder = recipe.checkpoint.every_steps or 0, Path(asked["out"]).parent
        around: Callable[[], AbstractContextManager[Any]] = nullcontext
        if asked["watched"]:
            around = _watched(model)
        workers, batch = recipe.data.threads or 1, recipe.batch // ranks
        stream = _endless(torch.utils.data.DataLoader(train, max(1, batch), shuffle=True, num_workers=workers))
        stack.callback(stream.close)
        next(stream)  # the workers have started

        def run(steps: int) -> None:
            ends = time.monotonic() + asked["seconds"]
            for number in range(1, steps + 1):
                images, labels = next(stream)
                with around():
                    step(images, labels)
                if every and number % every == 0:
                    assert held_out is not None
                    _evaluate(model, held_out, workers)
                if saving and number % saving == 0:
                    torch.save(model.state_dict(), folder / f"plain-{os.getpid()}.pt")
                # Ranks have to make as many steps; alone, a profile of very many operations would fill the memory.
                if ranks == 1 and time.monotonic() > ends:
                    break

        if asked["watched"]:
            run(asked["steps"])
            return
        run(2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run(asked["steps"])
        found = profile.key_averages()
        largest = max(found, key=lambda one: one.self_cpu_time_total)
        share = largest.self_cpu_time_total / max(1e-9, sum(one.self_cpu_time_total for one in found))
        if os.environ.get("RANK", "0") == "0":
            Path(asked["out"]).write_text(json.dumps({"largest": largest.key, "share": share}), encoding="utf-8")


def stepping(
    recipe: TrainRecipe, model: nn.Module, task: Task, transform: Callable[..., Any] | None
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A step as one writes it by hand."""
    mean = torch.tensor(recipe.augment.mean if recipe.augment.mean != "auto" else (127.5,) * 3)
    std = torch.tensor(recipe.augment.std if recipe.augment.std != "auto" else (64.0,) * 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        inputs = ((images.float() - mean) / std).permute(0, 3, 1, 2)
        if transform is not None:
            inputs, labels = transform(inputs, labels, np.zeros(len(inputs), np.uint64))
        task.loss(model(inputs), labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _endless(loader: torch.utils.data.DataLoader[Any]) -> Generator[Any]:
    while True:
        yield from loader


def _evaluate(model: nn.Module, held_out: Images, workers: int) -> None:
    model.eval()
    with torch.no_grad():
        for images, _ in torch.utils.data.DataLoader(held_out, 1000, num_workers=workers):
            model(images.float().permute(0, 3, 1, 2) / 255)
    model.train()


def _watched(model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    traceml: Any = import_module(next(name for name in PACKAGES if find_spec(name) is not None))
    traceml.init(mode="auto")
    return lambda: traceml.trace_step(model)


if __name__ == "__main__":
    if str(Path.cwd()) not in sys.path:  # a peer runs this as a script
        sys.path.insert(0, str(Path.cwd()))
    main()
