"""The folder of a loop, and its journal: which stage of which round is done, and with which result.

FOLDER/
    journal.json                what is done; replaced as a whole after each stage
    loop.html                   the page
    rounds/0/members/1, 2 ...   run folders of the networks before the first round
    rounds/1/mined/             folder of `headway mine`
    rounds/1/picks.json         IDs of the picks in the store, and what the networks proposed
    rounds/1/members/1, 2 ...   run folders of the networks that were trained on the new labels
    rounds/1/answers.safetensors  which images of the evaluation split each of them has right
    rounds/1/export/            the accepted network
    rounds/1/verify/            what the program of `verify` has printed about it
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final, get_args

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import expect_empty_folder, read_text, sync_folder, write_atomically
from headway.core.run_folder import RunFolder
from headway.core.untrusted_json import JsonError, expect_entries, is_number, is_object, is_whole_number, parse_object

FORMAT = 1
StageName = Literal["begin", "train", "mine", "label", "gate", "export", "verify"]
_NAMES: tuple[str, ...] = get_args(StageName)


@final
@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage that is done.

    Attributes:
        round: number of its round; 0 before the first one.
        name: `begin` (pin version and settings), `train`, `mine`, `label`, `gate`, `export` or `verify`.
        facts: its result.
        seconds: wall time of the last try; for `label` since the picks were there.
        cpu_s: CPU seconds of the last try, with those of child processes.
        ended: seconds since 1970.
    """

    round: int
    name: str
    facts: dict[str, Any]
    seconds: float
    cpu_s: float
    ended: float


@final
class LoopFolder:
    """Paths of a loop's folder, and its journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal_path = folder / "journal.json"
        self.page_path = folder / "loop.html"
        self.stages: tuple[Stage, ...] = ()

    @staticmethod
    def open_or_create(folder: Path) -> LoopFolder:
        """Opens the folder of a loop, or creates one in an empty or missing folder.

        Raises:
            UsageError: it holds other files.
            HeadwayError: the journal is damaged.
        """
        loop = LoopFolder(folder)
        if not loop.journal_path.exists():
            expect_empty_folder(folder, "--out", unfinished=(loop.journal_path.name,))
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                what = f"the folder of the loop cannot be created ({error.strerror})"
                raise UsageError(what, where=str(folder), fix="Name another one with --out.") from error
        return loop

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes from running the loop for the duration of the block, and reads its journal.

        Raises:
            UsageError: another process runs it.
            HeadwayError: the journal is damaged.
        """
        # The lock of a run folder suits any folder: the kernel releases that of a killed process.
        with RunFolder(self.folder).lock("another process runs this loop"):
            self.stages = self._read()
            yield

    def find(self, number: int, name: StageName) -> Stage | None:
        """Returns a stage of a round, the newest if it was done again; None: it is not done."""
        return next((stage for stage in reversed(self.stages) if (stage.round, stage.name) == (number, name)), None)

    def note(self, number: int, name: StageName, facts: dict[str, Any], *, seconds: float, cpu_s: float) -> Stage:
        """Notes that a stage is done. It is on disk when this returns."""
        stage = Stage(
            round=number, name=name, facts=facts, seconds=round(seconds, 3), cpu_s=round(cpu_s, 3), ended=time.time()
        )
        stages = (*self.stages, stage)
        tree = {"format": FORMAT, "stages": [asdict(one) for one in stages]}
        write_atomically(self.journal_path, json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        sync_folder(self.folder)
        self.stages = stages
        return stage

    def find_member(self, number: int, member: int) -> Path:
        """Returns the run folder of a member, the first of which is 1."""
        return self.folder / "rounds" / str(number) / "members" / str(member)

    def find_answers(self, number: int) -> Path:
        """Returns the file with the answers of a round's members."""
        return self.folder / "rounds" / str(number) / "answers.safetensors"

    def find_mined(self, number: int) -> Path:
        """Returns the folder of a round's picks."""
        return self.folder / "rounds" / str(number) / "mined"

    def find_picks(self, number: int) -> Path:
        """Returns the file with the IDs of a round's picks."""
        return self.folder / "rounds" / str(number) / "picks.json"

    def find_export(self, number: int) -> Path:
        """Returns the folder of a round's export."""
        return self.folder / "rounds" / str(number) / "export"

    def find_verified(self, number: int) -> Path:
        """Returns the folder with what the program of `verify` has printed about a round's export."""
        return self.folder / "rounds" / str(number) / "verify"

    def _read(self) -> tuple[Stage, ...]:
        if not self.journal_path.exists():
            return ()
        checks: Any = {
            "round": (is_whole_number, "a whole number"),
            "name": (lambda value: value in _NAMES, "the name of a stage"),
            "facts": (is_object, "an object"),
            "seconds": (is_number, "a number"),
            "cpu_s": (is_number, "a number"),
            "ended": (is_number, "a number"),
        }
        try:
            tree = parse_object(read_text(self.journal_path))
            entries = tree.get("stages")
            if tree.get("format") != FORMAT or not isinstance(entries, list):
                raise JsonError("it has another format")
            for place, entry in enumerate(entries):
                expect_entries(entry, checks, f"stages[{place}].")
            return tuple(Stage(**{name: entry[name] for name in checks}) for entry in entries)
        except (OSError, UnicodeDecodeError, JsonError) as error:
            fix = "Copy it from a backup, or begin anew with another --out."
            raise HeadwayError(f"the journal is damaged: {error}", where=str(self.journal_path), fix=fix) from None
