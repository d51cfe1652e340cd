"""CallbackContext: what a callback sees of a run, and the ways in which it may act on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from PIL import Image

from headway.core.modules import switch_to_evaluation
from headway.observe.panel_images import encode_image
from headway.page import panel
from headway.page.panel import Panel
from headway.setup.recipe import TrainRecipe
from headway.setup.run_log import NON_METRIC_KEYS

if TYPE_CHECKING:
    from headway.training.trainer import Trainer

SECTION = "Callbacks"
# Later panels of a callback come after those of the evaluation.
FIRST_ORDER = 480
MAX_IMAGES = 64


@final
class CallbackContext:
    """The argument of every hook of a callback.

    Attributes:
        pending: numbers that `log` got and that are not written yet: (step, position, numbers).
        panels: panels of the hook that runs.
    """

    def __init__(self, trainer: Trainer, renew: Callable[[], None]) -> None:
        self._trainer, self._renew = trainer, renew
        self._name = ""
        self.pending: list[tuple[int, int, dict[str, Any]]] = []
        self.panels: list[Panel] = []

    def begin_hook(self, name: str) -> None:
        """Notes the callback that acts from now on. Headway calls it."""
        self._name = name

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._trainer.step

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return self._trainer.setup.steps

    @property
    def position(self) -> int:
        """Number of samples served."""
        return self._trainer.position

    @property
    def epoch(self) -> float:
        """Number of epochs done, with fractions."""
        return self._trainer.position / self._trainer.setup.epoch

    @property
    def recipe(self) -> TrainRecipe:
        """The resolved recipe."""
        return self._trainer.setup.recipe

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._trainer.run_folder.folder

    @property
    def is_lead(self) -> bool:
        """True on the rank that writes the run folder; a callback runs on this rank alone unless it asks for all."""
        return self._trainer.is_lead

    @property
    def finished(self) -> bool:
        """True if the run is at its end. In `on_end`, False means that it was stopped and can be resumed."""
        return self._trainer.finished

    @property
    def model(self) -> torch.nn.Module:
        """The network, with its newest weights. A hook may read it; see `changes_training` in the documentation."""
        return self._trainer.setup.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. A hook may read its state."""
        return self._trainer.setup.optimizer

    @property
    def lr(self) -> float:
        """Learning rate of the newest step."""
        setup = self._trainer.setup
        # `step` counts the steps done, so the newest one has the number below. Before the first, it is the rate of the
        # first.
        return setup.lr_at(setup.plan.find_position(max(self.step - 1, 0)))

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the newest evaluation; empty before the first one."""
        # A copy: a hook that changes it would change what the run saves.
        return dict(self._trainer.metrics or {})

    @property
    def best(self) -> dict[str, float]:
        """Metrics of the best evaluation so far, with its step and epoch; empty before the first one."""
        return dict(self._trainer.best or {})

    @property
    def outputs(self) -> torch.Tensor | None:
        """Outputs of the network for the newest micro-batch, float32 [b, outputs], on the device; None at first."""
        return None if self._trainer.last_outputs is None else self._trainer.last_outputs[0]

    @property
    def labels(self) -> torch.Tensor | None:
        """Labels of the newest micro-batch on the device, as the task gets them; None at first."""
        return None if self._trainer.last_outputs is None else self._trainer.last_outputs[1]

    @property
    def losses(self) -> torch.Tensor | None:
        """Losses of the samples of the newest micro-batch, [b], on the device; None at first.

        Reading a value of it in `on_step` is a host-device sync. `log` takes tensors and reads them later.
        """
        return self._trainer.last_losses

    def log(self, **numbers: Any) -> None:
        """Logs numbers of this step to metrics.jsonl, the report and the sinks, under `callback/NAME`.

        A tensor stays on the device until the next logging step, so that nothing waits for it.

        Raises:
            TypeError: a value is no number. ValueError: a name is taken.
        """
        kept: dict[str, Any] = {}
        for name, value in numbers.items():
            if name in NON_METRIC_KEYS:
                raise ValueError(f"run.log cannot write {name!r}, which every record has: give it another name")
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise TypeError(f"run.log({name}=...) takes one number, not a tensor of shape {list(value.shape)}")
                # Cloned, because the next step may write into the same memory.
                kept[name] = value.detach().clone()
            elif isinstance(value, int | float | np.number | np.bool_):
                kept[name] = value
            else:
                raise TypeError(f"run.log({name}=...) takes a number, not a {type(value).__name__}")
        # Several calls within a step become one record.
        if self.pending and self.pending[-1][0] == self.step:
            self.pending[-1][2].update(kept)
        elif kept:
            self.pending.append((self.step, self.position, kept))

    def log_images(self, name: str, images: Any, captions: Sequence[str] = ()) -> None:
        """Shows images in the report and in the sinks; later images of the same name replace them.

        Args:
            name: name of the panel: letters, digits, - and _.
            images: one image or several: PIL images, or uint8 arrays or tensors [H, W] or [H, W, C].

        Raises:
            TypeError, ValueError: the images are of another form. ValueError: the name is none.
        """
        several = list(images) if isinstance(images, list | tuple) else [images]
        if not 0 < len(several) <= MAX_IMAGES:
            raise ValueError(f"run.log_images takes 1 to {MAX_IMAGES} images, not {len(several)}")
        # Captions may be fewer than the images: the rest gets empty ones, and `zip` drops those that are too many.
        texts = [*captions, *[""] * len(several)]
        pictures = [(_encode_png(image), text, "") for image, text in zip(several, texts, strict=False)]
        self.panels.append(panel.images(self._name_panel(name), name, pictures, width="full", **self._describe()))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Shows a table in the report and in the sinks; a later table of the same name replaces it.

        Args:
            name: name of the panel: letters, digits, - and _.
            rows: cells of each row; numbers are shown with four digits.

        Raises:
            ValueError: a row has another number of cells than there are columns, or the name is none.
        """
        for number, row in enumerate(rows):
            if len(row) != len(columns):
                raise ValueError(f"row {number} of the table {name!r} has {len(row)} cells for {len(columns)} columns")
        cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
        self.panels.append(panel.table(self._name_panel(name), name, list(columns), cells, **self._describe()))

    def stop(self, reason: str) -> None:
        """Ends the run after this step, or with several ranks after the next one, when all have learnt of it.

        An evaluation and a checkpoint follow. The run is then finished, and its summary holds the reason.
        """
        # Only noted here. The trainer ends the run, because all ranks have to stop at the same step.
        self._trainer.end.reason = f"{self._name}: {reason}"

    @contextmanager
    def evaluation_mode(self) -> Iterator[torch.nn.Module]:
        """Gives the network as it is evaluated: averaged weights, evaluation mode, no gradients.

        The training weights and modes are back after the block.
        """
        try:
            with self._trainer.use_averages(), switch_to_evaluation(self.model), torch.no_grad():
                yield self.model
        finally:
            # Averages that are swapped in and out again write to the weights. Without this, the guard would take that
            # for a change by the callback.
            self._renew()

    def _name_panel(self, name: str) -> str:
        if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
            raise ValueError(f"{name!r} cannot name a panel: use letters, digits, - and _")
        return f"callback-{name}"

    def _describe(self) -> dict[str, Any]:
        note = f"Logged by {self._name} at step {self.step:,}."
        return {"note": note, "section": SECTION, "order": FIRST_ORDER}


def _encode_png(image: Any) -> str:
    """Returns an image as a data URI."""
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu().numpy()
    if isinstance(image, np.ndarray):
        channels = image.shape[2] if image.ndim == 3 else 1
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or channels not in (1, 3, 4) or not image.size:
            form = f"{image.dtype} {list(image.shape)}"
            raise ValueError(f"an image is uint8 [H, W] or [H, W, C] with 1, 3 or 4 channels, not {form}")
        # Pillow takes a grey image as [H, W] only.
        image = Image.fromarray(image[..., 0] if image.ndim == 3 and channels == 1 else image)
    if not isinstance(image, Image.Image):
        raise TypeError(f"an image is a PIL image, an array or a tensor, not a {type(image).__name__}")
    return encode_image(image)
