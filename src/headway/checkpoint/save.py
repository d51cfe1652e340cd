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
import logging
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
from headway.checkpoint.pieces import Piece, SplitTensor, join_pieces
from headway.checkpoint.sharding import assign_owners, compute_layout_digest, copy_to_host
from headway.checkpoint.tensors_file import TensorsFile
from headway.core.errors import CheckpointError, CommunicationError, GenerationEndedError, HeadwayError
from headway.core.files import describe_os_error

LOG = logging.getLogger("headway.checkpoint")

Tensors = Mapping[str, torch.Tensor | Piece]


class GivenUpError(Exception):
    """The save was given up, because its ranks are no longer together."""


@dataclass(frozen=True)
class SaveSetting:
    """Folder, ranks and callbacks of a save.

    Attributes:
        folder: where the checkpoint is written.
        keep: number of checkpoints to keep.
        exchange: messages between the ranks of this save.
        number: running number of this save among these ranks, the same on all of them.
        shared: True if every rank sees the folder, False if not, None if not known yet.
        confirm: called by rank 0 right before the checkpoint becomes visible; if it raises, it never does.
        resume_command: command that resumes the training after a failed save; may be empty.
    """

    folder: CheckpointFolder
    keep: int
    exchange: SaveExchange
    number: int
    shared: bool | None
    confirm: Callable[[], None]
    resume_command: str = ""


@final
class SaveJob:
    """One rank's part of a save. The constructor copies the tensors; `run` does the rest, in any thread.

    Args:
        copy: if False, writes from the tensors themselves, which must not change before `run` ends.

    Attributes:
        exchange: messages between the ranks of this save.
        path: the finished checkpoint, on rank 0; None before, and on the other ranks.
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
        self._rank = setting.exchange.rank
        self._follower_ranks = range(1, setting.exchange.size)
        # Copied as deeply as the tensors: training goes on and may change them.
        self._step, self._scalars = step, copy_scalars(scalars)
        self._deadline_s = math.inf
        self.path: Location | None = None
        self.shared = setting.shared
        self.done = False
        self.error: BaseException | None = None
        pieces = {name: value for name, value in tensors.items() if isinstance(value, Piece)}
        self._described_pieces = {name: piece.describe() for name, piece in pieces.items()}
        whole = {name: value for name, value in tensors.items() if not isinstance(value, Piece)}
        # Every rank computes owners and layout by itself; the layouts are compared before anything is written.
        owner_by_name = assign_owners(whole, setting.exchange.size)
        self._layout_digest = compute_layout_digest(whole, owner_by_name)
        self._own_names = [*(name for name, owner in owner_by_name.items() if owner == self._rank), *pieces]
        # Nobody else has this rank's pieces.
        held = whole | {name: piece.tensor for name, piece in pieces.items()}
        # Rank 0 has to write everything if other ranks do not see the folder, which may not be known yet.
        if self._rank == 0 and not self.shared:
            own_tensors = held
        else:
            own_names = [] if self.shared is False else self._own_names
            own_tensors = {name: held[name] for name in own_names}
        self._tensors, self._synchronize_copies = copy_to_host(own_tensors) if copy else (own_tensors, _do_nothing)

    def run(self) -> None:
        """Writes this rank's share and waits for the others. Raises nothing: see `error`."""
        try:
            # On CUDA the copies may still be on their way.
            self._synchronize_copies()
            if self._rank == 0:
                self._run_lead()
            else:
                self._run_follower()
            self.done = True
        except BaseException as error:
            # After the time limit of `give_up` nobody wants to know.
            if not _needs_no_message(error) and time.monotonic() < self._deadline_s:
                self.error = error
        finally:
            # Frees the copy: it is as large as the training state.
            self._tensors = {}

    def give_up(self, after_s: float = 0.0) -> None:
        """Ends the wait for other ranks after `after_s`; an unfinished draft then never becomes a checkpoint."""
        self._deadline_s = time.monotonic() + after_s

    def _run_lead(self) -> None:
        draft = None
        try:
            # Listed before the draft: only these may be pruned, see `prune`.
            before = self._folder.paths()
            draft = self._folder.begin_draft(self._step)
            self._publish("draft", {"token": draft.token, "step": self._step, "layout": self._layout_digest})
            split_tensors: dict[str, SplitTensor] = {}
            if self.shared is False:
                self._expect_no_pieces()
                files = [self._write_tensors(draft, list(self._tensors))]
            else:
                files, split_tensors = self._gather_files(draft, self._write_tensors(draft, self._own_names))
            manifest = Manifest(self._step, self._scalars, tuple(files), split_tensors)
            self.path = draft.publish(manifest, self._confirm)
            prune(self._folder, before, self.path, self._setting.keep)
            self._publish("outcome", {"shared": self.shared})
        except BaseException as error:
            user_error = self._add_resume_command(self._describe_os_failure(error))
            # The other ranks wait for these messages. If the store is gone too, they end by their own time limits.
            with suppress(Exception):
                if draft is None:
                    self._publish("draft", {})
                self._publish("outcome", {"error": None if _needs_no_message(error) else _error_to_json(user_error)})
            if draft is not None and self.path is None:
                draft.discard()
            if user_error is error:
                raise
            raise user_error from error

    def _gather_files(
        self, draft: CheckpointDraft, own_file: FileEntry
    ) -> tuple[list[FileEntry], dict[str, SplitTensor]]:
        """Returns the files of all ranks in order, and the tensors that they hold in pieces.

        It is one file of everything if a rank cannot see the draft.
        """
        shares = self._collect("share", self._follower_ranks)
        # One value per rank and save: the store would grow during the whole run.
        self.exchange.forget(self._build_key("share"), self._follower_ranks)
        for rank, share in zip(self._follower_ranks, shares, strict=True):
            if "error" in share:
                raise HeadwayError(**share["error"])
            if share["token"] != draft.token:
                what = f"rank {rank} answered for another save"
                raise HeadwayError(what, fix="Give the ranks a new store or name whenever they start or change.")
        # A rank without a shared file system answers without a file.
        blind_ranks = [rank for rank, share in zip(self._follower_ranks, shares, strict=True) if "file" not in share]
        if not blind_ranks:
            self.shared = True
            others = [(FileEntry(**share["file"]), share["pieces"]) for share in shares if share["file"]]
            written = [(own_file, self._described_pieces), *others]
            return [file for file, _ in written], join_pieces([(file.name, pieces) for file, pieces in written])
        ranks = f"rank{'s' * (len(blind_ranks) > 1)} {', '.join(map(str, blind_ranks))}"
        if self.shared:
            what = f"{ranks} can no longer see the folder of checkpoints"
            raise HeadwayError(what, where=self._folder.shown, fix="Mount it there again.")
        if self._described_pieces or any(share.get("pieces") for share in shares):
            raise self._build_pieces_error(ranks)
        LOG.warning(f"{self._folder.shown} cannot be seen by {ranks}: rank 0 writes the checkpoints alone.")
        self.shared = False
        return [self._write_tensors(draft, list(self._tensors))], {}

    def _expect_no_pieces(self) -> None:
        """Raises HeadwayError if a rank has pieces, where rank 0 writes alone."""
        shares = self._collect("share", self._follower_ranks)
        self.exchange.forget(self._build_key("share"), self._follower_ranks)
        if self._described_pieces or any(share["pieces"] for share in shares):
            raise self._build_pieces_error("other ranks")

    def _build_pieces_error(self, ranks: str) -> HeadwayError:
        what = f"{self._folder.shown} cannot be seen by {ranks}, and each rank has to write its piece of a tensor"
        fix = "Set checkpoint.folder to a folder that all hosts share, or to an address such as s3://bucket/folder."
        return HeadwayError(what, fix=fix)

    def _run_follower(self) -> None:
        # Where rank 0 writes alone, this rank only says if it has pieces, and waits for the outcome.
        if self.shared is False:
            self._publish("share", {"pieces": bool(self._described_pieces)})
        else:
            try:
                share = self._write_share(self._collect("draft", [0])[0])
            except Exception as error:
                if _needs_no_message(error):
                    raise
                # Rank 0 raises it on all ranks, with this rank's number in it.
                user_error = self._describe_os_failure(error)
                what = f"{getattr(user_error, 'what', user_error)} (rank {self._rank})"
                share = {"error": _error_to_json(user_error) | {"what": what}}
            self._publish("share", share)
        outcome = self._collect("outcome", [0])[0]
        if "error" in outcome:
            raise HeadwayError(**outcome["error"]) if outcome["error"] else GivenUpError
        self.shared = outcome["shared"]

    def _write_share(self, announcement: dict[str, Any]) -> dict[str, Any]:
        """Writes this rank's tensors into the draft that rank 0 announced, and returns the message for rank 0."""
        if not announcement:
            # Rank 0 failed before its draft; the outcome will say how.
            return {}
        if announcement["step"] != self._step:
            raise CheckpointError(f"it saves step {self._step}, rank 0 step {announcement['step']}")
        # Ranks that disagree would write a checkpoint with tensors missing or twice.
        if announcement["layout"] != self._layout_digest:
            raise CheckpointError("its tensors have other names, dtypes or shapes than those of rank 0")
        draft = self._folder.join_draft(self._step, announcement["token"])
        if draft is None:
            return {"token": announcement["token"], "pieces": self._described_pieces}
        return {
            "token": draft.token,
            "file": asdict(self._write_tensors(draft, self._own_names)) if self._own_names else None,
            "pieces": self._described_pieces,
        }

    def _write_tensors(self, draft: CheckpointDraft, names: list[str]) -> FileEntry:
        tensors = TensorsFile({name: self._tensors[name] for name in names})
        return draft.put(f"tensors-{self._rank}.safetensors", tensors, self._check)

    def _check(self) -> None:
        """Raises GivenUpError after the time limit. Called between polls, and between attempts of an upload."""
        if time.monotonic() >= self._deadline_s:
            raise GivenUpError

    def _confirm(self) -> None:
        self._check()
        self._setting.confirm()

    def _build_key(self, part: str) -> str:
        return f"{self._setting.number}/{part}"

    def _publish(self, part: str, value: dict[str, Any]) -> None:
        self.exchange.publish(self._build_key(part), json.dumps(value).encode())

    def _collect(self, part: str, ranks: range | list[int]) -> list[dict[str, Any]]:
        return [json.loads(value) for value in self.exchange.collect(self._build_key(part), ranks, self._check)]

    def _describe_os_failure(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError):
            return error
        what = f"the checkpoint of step {self._step} could not be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, remedy = f"the disk is full, {what}", "make room"
        else:
            what, remedy = f"{what} ({describe_os_error(error)})", "mend it"
        return HeadwayError(what, where=self._folder.shown, fix=f"Nothing before it is lost: {remedy}.")

    def _add_resume_command(self, error: BaseException) -> BaseException:
        """Appends the command that resumes the run, if the folder or the network failed and not the state itself."""
        command = self._setting.resume_command
        if not isinstance(error, HeadwayError) or isinstance(error, CheckpointError | CommunicationError):
            return error
        fix = f"{error.fix} Then go on: {command}".strip() if command else error.fix
        return HeadwayError(error.what, where=error.where, fix=fix)


def _do_nothing() -> None:
    pass


def _needs_no_message(error: BaseException) -> bool:
    """Returns True if an error needs no message: whoever gave the save up, or ended the generation, knows already."""
    return isinstance(error, GivenUpError | GenerationEndedError)


def _error_to_json(error: BaseException) -> dict[str, str]:
    if isinstance(error, HeadwayError):
        return {"what": error.what, "where": error.where, "fix": error.fix}
    return {"what": f"{type(error).__name__}: {error}"}
