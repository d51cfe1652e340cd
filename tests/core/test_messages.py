"""Messages: the command line prints them, and a user's script gets them as records of `logging`."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
from tests._support import collect_messages, headway, packed_digits, write_recipe

from headway.comm.comm_recipe import CommRecipe
from headway.core.launcher_environment import LaunchedProcess
from headway.core.messages import RUN_ROOMS, mute_messages, show_messages
from headway.launch.ranks import Ranks

SOURCE = Path(__file__).resolve().parents[2] / "src/headway"
LARGE = "The batch of 500 is larger than the data set of 180: each step spans epochs."
SCRIPT = """
import logging, sys
from pathlib import Path

from headway.core.recipe import read_recipe
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe

if sys.argv[2:]:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
build_setup(read_recipe(Path(sys.argv[1]), ("batch=500",), TrainRecipe)).inputs.close()
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    packed_digits(folder)
    return write_recipe(folder / "recipe.yaml", epochs=1, data={"cache": "none"})


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The logger of Headway, as it was again afterwards."""
    found = logging.getLogger("headway")
    before = found.handlers, found.level, found.propagate
    yield found
    found.handlers, found.propagate = before[0], before[2]
    found.setLevel(before[1])


def run_script(*arguments: str | Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_script_shows_warnings_and_its_own_configuration_shows_all(recipe: Path, tmp_path: Path) -> None:
    warnings, lines = run_script(recipe), run_script(recipe, "configured")
    records = [re.fullmatch(r"headway\.(\w+) (INFO|WARNING) (.*)", line) for line in lines]
    messages = [record[3] for record in records if record]
    assert len(messages) == len(lines)
    assert [record[3] for record in records if record and record[2] == "WARNING"] == warnings
    assert LARGE in warnings
    assert any(text.startswith("Network: 650 parameters") for text in messages)
    assert not any(text.startswith("Network") for text in warnings)
    # The command line has the same sentences in the same order, and nothing around them.
    printed = headway("train", recipe, "--run", tmp_path / "run", "batch=500").err.splitlines()
    assert printed[: len(messages)] == messages
    assert all(line.startswith(("evaluate", "train")) for line in printed[len(messages) :])


def test_the_command_line_prints_each_message_once_on_what_is_stderr_then(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    show_messages()
    show_messages()
    part, err = logging.getLogger("headway.training"), StringIO()
    with redirect_stderr(err):
        part.debug("too much")
        part.info("100 % of \x1b[2J")
        part.warning("the second of %d", 2)
    assert err.getvalue() == "100 % of \\x1b[2J\nthe second of 2\n"
    assert caplog.messages == [], "a handler of the user's own code would print it again"


def test_rooms_are_muted_within_a_block_and_unless_they_may_speak() -> None:
    train, data = logging.getLogger("headway.training"), logging.getLogger("headway.data")
    speaks = False
    with collect_messages() as said:
        with mute_messages(unless=lambda: speaks), mute_messages(["training"], unless=lambda: speaks):
            train.warning("no")
            data.warning("of one host")
            speaks = True
            train.info("as rank 0")
        with mute_messages(["data"]):
            data.warning("no")
            train.info("of another room")
        data.info("afterwards")
    assert said == ["of one host", "as rank 0", "of another room", "afterwards"]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_speaks_for_all_ranks(rank: int) -> None:
    seat = LaunchedProcess(rank, 2, rank, 2, "127.0.0.1", 1, "torchrun")  # they do not meet
    with collect_messages() as said:
        with Ranks(CommRecipe(), seat, None):
            for room in (*RUN_ROOMS, "data", "observe"):
                logging.getLogger(f"headway.{room}").warning(room)
        logging.getLogger("headway.training").warning("alone again")
    assert said == [*(RUN_ROOMS if rank == 0 else ()), "data", "observe", "alone again"]


def test_each_room_has_its_own_logger() -> None:
    loggers, muted = set[tuple[str, str]](), set(RUN_ROOMS)
    for path in SOURCE.rglob("*.py"):
        text, room = path.read_text(), path.relative_to(SOURCE).parts[0]
        loggers |= {(room, name) for name in re.findall(r'getLogger\("headway\.(\w+)"\)', text)}
        muted |= set(re.findall(r'mute_messages\(\["(\w+)"\]', text))
    assert [(room, name) for room, name in loggers if room != name] == []
    # A room that was renamed would be muted no more.
    assert muted <= {name for _, name in loggers}
    assert muted > set(RUN_ROOMS)
