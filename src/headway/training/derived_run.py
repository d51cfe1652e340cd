"""Run folders whose weights were not trained there: checkpoints of a run, and averages of weights.

Such a folder has a recipe, provenance and weights, so that it predicts, is evaluated, drawn and exported as a run is.
`parents` in its provenance names where the weights come from; it cannot be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors
from torch import Tensor

from headway.checkpoint.checkpoints import Checkpoints, read
from headway.checkpoint.compatibility import find_mismatch, select_by_prefix
from headway.core.errors import CheckpointError, UsageError
from headway.core.files import write_atomically
from headway.core.run_folder import RunFolder, collect_provenance
from headway.training.averages import WeightAverages
from headway.training.runs import load_trained

INHERITED = (
    *("ranks", "device", "torch_threads", "fingerprint", "target", "samples", "recipe"),
    *("parameters", "multiply_adds"),
)
"""Facts in the provenance of a run that hold for weights derived from it."""


def write_derived_run(
    folder: Path,
    parent: RunFolder,
    state: Mapping[str, Tensor],
    *,
    parents: Sequence[Mapping[str, Any]],
) -> RunFolder:
    """Writes weights into a new run folder, with the recipe of the run that they derive from.

    Args:
        parent: the run whose recipe, labels and data are taken over.
        state: tensors by name, as the network's state dict.
        parents: origins of the weights, for the provenance: each a run folder, with its step or sha256.

    Raises:
        UsageError: the folder exists.
    """
    run = RunFolder.create(folder)
    about = parent.read_provenance(origins=dict, base=str, target=dict, samples=int)
    inherited = {name: about[name] for name in INHERITED if name in about}
    more = {**inherited, "parents": [dict(one) for one in parents]}
    run.write_json("provenance", collect_provenance(about["origins"], Path(about["base"]), **more))
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    write_atomically(run.weights_path, save_tensors(tensors))
    # Last: the folder is a run from the moment its recipe exists.
    write_atomically(run.recipe_path, parent.read_recipe_text())
    return run


def extract_checkpoints(run: RunFolder, into: Path) -> list[RunFolder]:
    """Writes the weights of each checkpoint of a run into a run folder into/step-NUMBER, the oldest first.

    They are the weights that the run would evaluate at that step: the average, if the recipe asks for one.

    Raises:
        UsageError: the run has fewer than two checkpoints. CheckpointError: one is damaged or of another network.
    """
    setup = load_trained(run, wide=True)
    with closing(setup.inputs):
        options = setup.recipe.checkpoint
        found = Checkpoints.locate(run.folder, options.keep, options.folder, setup.loaded.base)
        paths = found.paths()[::-1]
        if len(paths) < 2:
            what = (
                f"this run has {len(paths) or 'no'} checkpoint{'' if paths else 's'}, and an ensemble needs two or more"
            )
            fix = "Keep more of them as it trains: checkpoint.keep=8, and checkpoint.every_epochs."
            raise UsageError(what, where=str(run.folder), fix=fix)
        members = []
        for path in paths:
            checkpoint = read(path)
            weights = select_by_prefix(checkpoint.tensors, "model/")
            if fault := find_mismatch(weights, setup.model.state_dict()):
                raise CheckpointError(f"this checkpoint belongs to another network: {fault}", where=str(path))
            setup.model.load_state_dict(weights)
            averages = WeightAverages(setup)
            averages.load_state(checkpoint.tensors, str(path))
            with averages.swap_in():
                parents = [{"run": str(run.folder.resolve()), "step": checkpoint.step}]
                members.append(write_derived_run(into / path.name, run, setup.model.state_dict(), parents=parents))
    return members
