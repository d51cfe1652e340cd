"""Outputs of trained networks over a data set: probabilities, and features, which are the input of the last layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway.core.errors import UsageError
from headway.core.run_folder import RunFolder
from headway.data.dataset import Dataset
from headway.lifecycle.mining.scores import compute_entropy
from headway.setup.train_setup import TrainSetup
from headway.training.ensemble import expect_several, join_members
from headway.training.evaluate import predict_outputs
from headway.training.runs import load_trained


@final
@dataclass(frozen=True, kw_only=True)
class NetworkOutputs:
    """Outputs over the n images of a data set that can be decoded.

    Attributes:
        samples: number of each image in the data set, int64 [n].
        probabilities: mean of the members' probabilities, float32 [n, classes].
        mean_entropy: mean of the members' entropies, float32 [n].
        features: input of the last layer of the first member, float32 [n, d]; None: not asked for.
        damaged: number of images that cannot be decoded.
    """

    samples: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    mean_entropy: NDArray[np.float32]
    features: NDArray[np.float32] | None
    damaged: int


@contextmanager
def load_networks(folders: Sequence[Path]) -> Iterator[TrainSetup]:
    """Loads runs, or ensembles of them, as one setup with `members`, and closes it at the end of the block.

    Raises:
        UsageError: a folder is not a run, has no weights, or is named twice; runs do not fit together; or they do not
            choose one of several classes.
    """
    if not folders:
        raise UsageError("mining needs a trained network", where="--runs", fix="Name a run folder, or several.")
    if len(folders) > 1:
        expect_several(folders)
    with ExitStack() as stack:
        setups, names = list[TrainSetup](), list[str]()
        for folder in folders:
            setup = load_trained(RunFolder.open_trained(folder))
            stack.enter_context(closing(setup.inputs))
            # An ensemble counts as its members.
            members = setup.members or (setup,)
            setups += members
            names += [str(folder)] * len(members)
        joined = join_members(setups, names)
        if joined.target.kind != "class" or joined.task.activation != "softmax":
            what = "this run does not choose one of several classes"
            raise UsageError(what, where=names[0], fix="Name a run whose labels are classes.")
        yield joined


def compute_outputs(
    setup: TrainSetup,
    dataset: Dataset,
    *,
    with_features: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NetworkOutputs:
    """Computes the outputs of all members in one pass over a data set.

    Args:
        setup: see `load_networks`.
        with_features: also keep the input of the first member's last layer.
        progress: called with (images done, images).

    Raises:
        UsageError: the last layer of the network is neither a linear layer nor a convolution.
    """
    members = list(setup.members)
    samples, probabilities, entropies = list[NDArray[Any]](), list[NDArray[Any]](), list[NDArray[Any]]()
    features = list[NDArray[Any]]()
    done = damaged = 0
    with ExitStack() as stack, torch.no_grad():
        captured = list[Tensor]()
        if with_features:
            captured = stack.enter_context(_capture_features(members[0].model))
            # A compiled network may have left the hook out.
            members[0] = replace(members[0], forward=members[0].model)
        for batch in setup.inputs.build_evaluation_loader(setup.recipe, dataset):
            is_good = batch.served >= 0
            done, damaged = done + len(is_good), damaged + int((~is_good).sum())
            good = torch.from_numpy(is_good).to(batch.images.device)
            # A copy, since a loader uses the memory of its batches again.
            images = batch.images[good]
            if len(images):
                samples.append(batch.served[is_good])
                captured.clear()
                outputs = [predict_outputs(member, images).double().softmax(dim=1) for member in members]
                stacked = torch.stack(outputs).numpy(force=True)
                probabilities.append(stacked.mean(axis=0).astype(np.float32))
                entropies.append(compute_entropy(stacked).mean(axis=0).astype(np.float32))
                if with_features:
                    # With views at test time there are several passes; the first is that of the images themselves.
                    features.append(captured[0].numpy(force=True))
            progress(done, len(dataset))
    if not samples:
        raise UsageError("none of its images can be decoded", where=str(dataset.folder), fix="Run headway verify.")
    return NetworkOutputs(
        samples=np.concatenate(samples),
        probabilities=np.concatenate(probabilities),
        mean_entropy=np.concatenate(entropies),
        features=np.concatenate(features) if with_features else None,
        damaged=damaged,
    )


@contextmanager
def _capture_features(model: nn.Module) -> Iterator[list[Tensor]]:
    """Gives a list to which each pass of the network adds the input of its last layer."""
    # The last module with parameters, as `replace_head` finds it.
    name, head = [
        (name, module) for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    ][-1]
    if not isinstance(head, nn.Linear | nn.Conv2d):
        what = f"the network's last layer {name!r} is a {type(head).__name__}, whose input is not a list of features"
        raise UsageError(what, fix="Use margin, entropy or bald, which need no features.")
    captured = list[Tensor]()

    def capture(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        hidden = inputs[0].float()
        # Several places, such as tokens, are averaged. A convolution has its features in the second dimension.
        if isinstance(module, nn.Conv2d):
            captured.append(hidden.flatten(2).mean(dim=2))
        else:
            captured.append(hidden.reshape(len(hidden), -1, hidden.shape[-1]).mean(dim=1))

    handle = head.register_forward_pre_hook(capture)
    try:
        yield captured
    finally:
        handle.remove()
