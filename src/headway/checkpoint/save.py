"""One save: every rank writes its share of the tensors, rank 0 the manifest.

Rank 0 begins a draft and publishes its token. Every rank writes its share into it and publishes the file's name, bytes
and sha256, or that it does not see the draft, or why it failed. Rank 0 writes the manifest, makes a checkpoint of the
draft, and publishes how it ended; so a failure ends the save on all ranks, with the same sentence.
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

from headway.checkpoint.agreement import Exchange
from headway.checkpoint.locations import Draft, Location, Place, prune
from headway.checkpoint.manifest import File, Manifest, copied_scalars
from headway.checkpoint.sharding import copied, layout, owners
from headway.checkpoint.tensors_file import TensorsFile
from headway.core.errors import CheckpointError, CommunicationError, GenerationEndedError, HeadwayError
from headway.core.files import describe_os_error

Tensors = Mapping[str, torch.Tensor]


class GivenUpError(Exception):
    """A save was given up: the ranks that made it are no longer together."""


@dataclass(frozen=True)
class Setting:
    """Where and with whom a save is made.

    Attributes:
        keep: how many checkpoints stay.
        number: of this save among these ranks; the same on all of them.
        shared: whether every rank sees the place; None: not known yet.
        confirm: called by rank 0 right before the checkpoint can be opened; what it raises keeps it from being so.
        say: told by rank 0, once, where not every rank sees the place.
        go_on: the command with which training can be gone on with after a save that failed; "" where there is none.
    """

    place: Place
    keep: int
    exchange: Exchange
    number: int
    shared: bool | None
    confirm: Callable[[], None]
    say: Callable[[str], object]
    go_on: str = ""


@final
class Flight:
    """One rank's part of a save. Making it takes the copy; `run` does the rest, in any thread.

    Args:
        copy: False writes from the tensors themselves, which may not change before `run` has ended.

    Attributes:
        exchange: with whom it is made.
        path: the checkpoint, on rank 0, once it is there.
        done: the save has come about, which rank 0 has told all.
        shared: whether every rank sees the place, once it has ended well.
        error: why it failed; None where it did not, or was given up.

    Raises:
        CheckpointError: a tensor has a dtype that cannot be saved. TypeError: the scalars are no JSON.
    """

    def __init__(
        self, setting: Setting, step: int, tensors: Tensors, scalars: Mapping[str, Any], *, copy: bool
    ) -> None:
        self._setting, self.exchange, self._place = setting, setting.exchange, setting.place
        self._rank, self._others = setting.exchange.rank, range(1, setting.exchange.size)
        self._step, self._scalars = step, copied_scalars(scalars)  # as deep a copy as the tensors'
        self._until_s = math.inf
        self.path: Location | None = None
        self.shared = setting.shared
        self.done = False
        self.error: BaseException | None = None
        owner = owners(tensors, setting.exchange.size)
        self._layout = layout(tensors, owner)
        self._mine = [name for name in owner if owner[name] == self._rank]
        if self.shared is False:
            taken = tensors if self._rank == 0 else {}
        elif self.shared is None and self._rank == 0:
            taken = tensors  # it may turn out that nobody else can write
        else:
            taken = {name: tensors[name] for name in self._mine}
        self._tensors, self._copied = copied(taken) if copy else (taken, _nothing)

    def run(self) -> None:
        """Writes, and waits for the others; raises nothing."""
        try:
            self._copied()
            if self._rank == 0:
                self._lead()
            else:
                self._follow()
            self.done = True
        except BaseException as error:
            if not _ends_quietly(error) and time.monotonic() < self._until_s:
                self.error = error
        finally:
            self._tensors = {}

    def give_up(self, after_s: float = 0.0) -> None:
        """Ends what waits for other ranks; a draft that is not a checkpoint by then never becomes one."""
        self._until_s = time.monotonic() + after_s

    def _lead(self) -> None:
        draft = None
        try:
            before = self._place.paths()
            draft = self._place.draft(self._step)
            self._publish("draft", {"token": draft.token, "step": self._step, "layout": self._layout})
            if self.shared is False:
                files = [self._put(draft, list(self._tensors))]
            else:
                files = self._gathered(draft, self._put(draft, self._mine))
            self.path = draft.publish(Manifest(self._step, self._scalars, tuple(files)), self._confirm)
            prune(self._place, before, self.path, self._setting.keep)
            self._publish("outcome", {"shared": self.shared})
        except BaseException as error:
            told = self._with_the_way_on(self._named(error))
            with suppress(Exception):
                if draft is None:
                    self._publish("draft", {})
                self._publish("outcome", {"error": None if _ends_quietly(error) else _plain(told)})
            if draft is not None and self.path is None:
                draft.discard()
            if told is error:
                raise
            raise told from error

    def _gathered(self, draft: Draft, mine: File) -> list[File]:
        """The files of all ranks, in their order; one of everything, where some do not see the draft."""
        shares = self._collect("share", self._others)
        self.exchange.forget(self._key("share"), self._others)
        for rank, share in zip(self._others, shares, strict=True):
            if "error" in share:
                raise HeadwayError(**share["error"])
            if share["token"] != draft.token:
                what = f"rank {rank} answers to another save"
                raise HeadwayError(what, fix="Give the ranks another store, or name, whenever they start or change.")
        blind = [rank for rank, share in zip(self._others, shares, strict=True) if "file" not in share]
        if not blind:
            self.shared = True
            return [mine, *(File(**share["file"]) for share in shares if share["file"])]
        ranks = f"rank{'s' * (len(blind) > 1)} {', '.join(map(str, blind))}"
        if self.shared:
            what = f"{ranks} can no longer see where the checkpoints lie"
            raise HeadwayError(what, where=self._place.shown, fix="Mount it there again.")
        self._setting.say(f"{self._place.shown} cannot be seen by {ranks}: rank 0 writes the checkpoints alone.")
        self.shared = False
        return [self._put(draft, list(self._tensors))]

    def _follow(self) -> None:
        if self.shared is not False:
            try:
                share = self._share(self._collect("draft", [0])[0])
            except Exception as error:
                if _ends_quietly(error):
                    raise
                told = self._named(error)
                share = {"error": _plain(told) | {"what": f"{getattr(told, 'what', told)} (rank {self._rank})"}}
            self._publish("share", share)
        outcome = self._collect("outcome", [0])[0]
        if "error" in outcome:
            raise HeadwayError(**outcome["error"]) if outcome["error"] else GivenUpError
        self.shared = outcome["shared"]

    def _share(self, told: dict[str, Any]) -> dict[str, Any]:
        if not told:
            return {}  # rank 0 failed; the outcome says how
        if told["step"] != self._step:
            raise CheckpointError(f"it saves step {self._step}, rank 0 step {told['step']}")
        if told["layout"] != self._layout:
            raise CheckpointError("its tensors have other names, dtypes or shapes than those of rank 0")
        draft = self._place.joined(self._step, told["token"])
        if draft is None:
            return {"token": told["token"]}
        return {"token": draft.token, "file": asdict(self._put(draft, self._mine)) if self._mine else None}

    def _put(self, draft: Draft, names: list[str]) -> File:
        tensors = TensorsFile({name: self._tensors[name] for name in names})
        return draft.put(f"tensors-{self._rank}.safetensors", tensors, self._check)

    def _check(self) -> None:
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

    def _named(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError):
            return error
        what, mend = f"the checkpoint of step {self._step} could not be written", "mend it"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, mend = f"the disk is full, {what}", "make room"
        else:
            what += f" ({describe_os_error(error)})"
        return HeadwayError(what, where=self._place.shown, fix=f"Nothing before it is lost: {mend}.")

    def _with_the_way_on(self, error: BaseException) -> BaseException:
        """Where the place or the network failed, and not the state that was to be saved."""
        if not isinstance(error, HeadwayError) or isinstance(error, CheckpointError | CommunicationError):
            return error
        fix = f"{error.fix} Then go on: {self._setting.go_on}".strip() if self._setting.go_on else error.fix
        return HeadwayError(error.what, where=error.where, fix=fix)


def _nothing() -> None:
    pass


def _ends_quietly(error: BaseException) -> bool:
    """Whoever gave it up, or ended the generation, knows already."""
    return isinstance(error, GivenUpError | GenerationEndedError)


def _plain(error: BaseException) -> dict[str, str]:
    if isinstance(error, HeadwayError):
        return {"what": error.what, "where": error.where, "fix": error.fix}
    return {"what": f"{type(error).__name__}: {error}"}
