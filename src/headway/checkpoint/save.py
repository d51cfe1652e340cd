"""One save: every rank writes its share of the tensors, and rank 0 writes the manifest.

1. Rank 0 begins a draft and publishes its token.
2. Every rank writes its share into the draft, and publishes the file's name, length and sha256, or that it cannot see
   the draft, or its error.
3. Rank 0 writes the manifest, turns the draft into a checkpoint and publishes the outcome. So an error on one rank ends
   the save on all ranks, with the same message.
"""

from __future__ import annotations

import errno
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from headway.checkpoint.agreement import SaveExchange
from headway.checkpoint.locations import CheckpointDraft, CheckpointFolder, Location, prune
from headway.checkpoint.manifest import FileEntry, Manifest, copy_scalars
from headway.checkpoint.sharding import assign_owners, compute_layout_digest, copy_to_host
from headway.checkpoint.tensors_file import TensorsFile
from headway.core.errors import CheckpointError, CommunicationError, GenerationEndedError, HeadwayError
from headway.core.files import describe_os_error

Tensors = Mapping[str, torch.Tensor]


class GivenUpError(Exception):
    """The save was given up, because its ranks are no longer together."""


@dataclass(frozen=True)
class SaveSetting:
    """Folder, ranks and callbacks of a save.

    Attributes:
        keep: number of checkpoints to keep.
        number: running number of this save among these ranks, the same on all of them.
        shared: True if every rank sees the folder, False if not, None if not known yet.
        confirm: called by rank 0 right before the checkpoint becomes visible; if it raises, it never does.
        say: called once, on rank 0, if not every rank sees the folder.
        resume_command: command that resumes the training after a failed save; may be empty.
    """

    folder: CheckpointFolder
    keep: int
    exchange: SaveExchange
    number: int
    shared: bool | None
    confirm: Callable[[], None]
    say: Callable[[str], object]
    resume_command: str = ""


@final
class SaveJob:
    """One rank's part of a save. The constructor copies the tensors; `run` does the rest, in any thread.

    Args:
        copy: if False, writes from the tensors themselves, which must not change before `run` ends.

    Attributes:
        exchange: messages between the ranks of this save.
        path: the finished checkpoint, on rank 0.
        done: True once rank 0 has told all ranks that the save succeeded.
        shared: True if every rank sees the folder; valid once the save has succeeded.
        error: the error of a failed save; None otherwise, also after it was given up.

    Raises:
        CheckpointError: a tensor has a dtype that cannot be saved.
        TypeError: the scalars are not JSON.
    """

    def __init__(
        self, setting: SaveSetting, step: int, tensors: Tensors, scalars: Mapping[str, Any], *, copy: bool
    ) -> None:
        self._setting, self.exchange, self._folder = setting, setting.exchange, setting.folder
        self._rank, self._others = setting.exchange.rank, range(1, setting.exchange.size)
        # Copied as deeply as the tensors: training goes on and may change them.
        self._step, self._scalars = step, copy_scalars(scalars)
        self._until_s = math.inf
        self.path: Location | None = None
        self.shared = setting.shared
        self.done = False
        self.error: BaseException | None = None
        # Every rank computes owners and layout by itself; the layouts are compared before anything is written.
        owner = assign_owners(tensors, setting.exchange.size)
        self._layout = compute_layout_digest(tensors, owner)
        self._mine = [name for name in owner if owner[name] == self._rank]
        if self.shared is False:
            taken = tensors if self._rank == 0 else {}
        elif self.shared is None and self._rank == 0:
            # Not known yet if other ranks see the folder: rank 0 may have to write everything.
            taken = tensors
        else:
            taken = {name: tensors[name] for name in self._mine}
        self._tensors, self._copied = copy_to_host(taken) if copy else (taken, _nothing)

    def run(self) -> None:
        """Writes this rank's share and waits for the others. Raises nothing: see `error`."""
        try:
            # On CUDA the copies may still be on their way.
            self._copied()
            if self._rank == 0:
                self._lead()
            else:
                self._follow()
            self.done = True
        except BaseException as error:
            # After the time limit of `give_up` nobody wants to know.
            if not _ends_quietly(error) and time.monotonic() < self._until_s:
                self.error = error
        finally:
            # Frees the copy: it is as large as the training state.
            self._tensors = {}

    def give_up(self, after_s: float = 0.0) -> None:
        """Ends the wait for other ranks after so many seconds; an unfinished draft then never becomes a checkpoint."""
        self._until_s = time.monotonic() + after_s

    def _lead(self) -> None:
        draft = None
        try:
            # Listed before the draft: only these may be pruned, see `prune`.
            before = self._folder.paths()
            draft = self._folder.begin_draft(self._step)
            self._publish("draft", {"token": draft.token, "step": self._step, "layout": self._layout})
            if self.shared is False:
                files = [self._put(draft, list(self._tensors))]
            else:
                files = self._gather_files(draft, self._put(draft, self._mine))
            self.path = draft.publish(Manifest(self._step, self._scalars, tuple(files)), self._confirm)
            prune(self._folder, before, self.path, self._setting.keep)
            self._publish("outcome", {"shared": self.shared})
        except BaseException as error:
            told = self._add_resume_command(self._explain(error))
            # The other ranks wait for these messages. If the store is gone too, they end by their own time limits.
            with suppress(Exception):
                if draft is None:
                    self._publish("draft", {})
                self._publish("outcome", {"error": None if _ends_quietly(error) else _plain(told)})
            if draft is not None and self.path is None:
                draft.discard()
            if told is error:
                raise
            raise told from error

    def _gather_files(self, draft: CheckpointDraft, mine: FileEntry) -> list[FileEntry]:
        """Returns the files of all ranks in order, or one file of everything if a rank cannot see the draft."""
        shares = self._collect("share", self._others)
        # One value per rank and save: the store would grow during the whole run.
        self.exchange.forget(self._key("share"), self._others)
        for rank, share in zip(self._others, shares, strict=True):
            if "error" in share:
                raise HeadwayError(**share["error"])
            if share["token"] != draft.token:
                what = f"rank {rank} answered for another save"
                raise HeadwayError(what, fix="Give the ranks a new store or name whenever they start or change.")
        # A rank without a shared file system answers without a file.
        blind = [rank for rank, share in zip(self._others, shares, strict=True) if "file" not in share]
        if not blind:
            self.shared = True
            return [mine, *(FileEntry(**share["file"]) for share in shares if share["file"])]
        ranks = f"rank{'s' * (len(blind) > 1)} {', '.join(map(str, blind))}"
        if self.shared:
            what = f"{ranks} can no longer see the folder of checkpoints"
            raise HeadwayError(what, where=self._folder.shown, fix="Mount it there again.")
        self._setting.say(f"{self._folder.shown} cannot be seen by {ranks}: rank 0 writes the checkpoints alone.")
        self.shared = False
        return [self._put(draft, list(self._tensors))]

    def _follow(self) -> None:
        # Where rank 0 writes alone, this rank only waits for the outcome.
        if self.shared is not False:
            try:
                share = self._share(self._collect("draft", [0])[0])
            except Exception as error:
                if _ends_quietly(error):
                    raise
                # Rank 0 raises it on all ranks, with this rank's number in it.
                told = self._explain(error)
                share = {"error": _plain(told) | {"what": f"{getattr(told, 'what', told)} (rank {self._rank})"}}
            self._publish("share", share)
        outcome = self._collect("outcome", [0])[0]
        if "error" in outcome:
            raise HeadwayError(**outcome["error"]) if outcome["error"] else GivenUpError
        self.shared = outcome["shared"]

    def _share(self, told: dict[str, Any]) -> dict[str, Any]:
        if not told:
            # Rank 0 failed before its draft; the outcome will say how.
            return {}
        if told["step"] != self._step:
            raise CheckpointError(f"it saves step {self._step}, rank 0 step {told['step']}")
        # Ranks that disagree would write a checkpoint with tensors missing or twice.
        if told["layout"] != self._layout:
            raise CheckpointError("its tensors have other names, dtypes or shapes than those of rank 0")
        draft = self._folder.join_draft(self._step, told["token"])
        if draft is None:
            return {"token": told["token"]}
        return {"token": draft.token, "file": asdict(self._put(draft, self._mine)) if self._mine else None}

    def _put(self, draft: CheckpointDraft, names: list[str]) -> FileEntry:
        tensors = TensorsFile({name: self._tensors[name] for name in names})
        return draft.put(f"tensors-{self._rank}.safetensors", tensors, self._check)

    def _check(self) -> None:
        # Called between two polls, and between two attempts of an upload.
        if time.monotonic() >= self._until_s:
            raise GivenUpError

    def _confirm(self) -> None:
        self._check()
        self._setting.confirm()

    def _key(self, part: str) -> str:
        return f"{self._setting.number}/{part}"

    def _publish(self, part: str, value: dict[str, Any]) -> None:
        self.exchange.publish(self._key(part), json.dumps(value).encode())

    def _collect(self, part: str, ranks: range | list[int]) -> list[dict[str, Any]]:
        return [json.loads(value) for value in self.exchange.collect(self._key(part), ranks, self._check)]

    def _explain(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError):
            return error
        what, mend = f"the checkpoint of step {self._step} could not be written", "mend it"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, mend = f"the disk is full, {what}", "make room"
        else:
            what += f" ({describe_os_error(error)})"
        return HeadwayError(what, where=self._folder.shown, fix=f"Nothing before it is lost: {mend}.")

    def _add_resume_command(self, error: BaseException) -> BaseException:
        """Appends the command that resumes the run, if the folder or the network failed and not the state itself."""
        if not isinstance(error, HeadwayError) or isinstance(error, CheckpointError | CommunicationError):
            return error
        fix = (
            f"{error.fix} Then go on: {self._setting.resume_command}".strip()
            if self._setting.resume_command
            else error.fix
        )
        return HeadwayError(error.what, where=error.where, fix=fix)


def _nothing() -> None:
    pass


def _ends_quietly(error: BaseException) -> bool:
    """Returns True if an error needs no message: whoever gave the save up, or ended the generation, knows already."""
    return isinstance(error, GivenUpError | GenerationEndedError)


def _plain(error: BaseException) -> dict[str, str]:
    if isinstance(error, HeadwayError):
        return {"what": error.what, "where": error.where, "fix": error.fix}
    return {"what": f"{type(error).__name__}: {error}"}
