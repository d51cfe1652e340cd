from __future__ import annotations

import json.decoder
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.errors import RecipeError, UserCodeError
from headway.core.user_code import import_user_object


@pytest.fixture(autouse=True)
def _restore_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_an_installed_module(tmp_path: Path) -> None:
    assert import_user_object("json.decoder:JSONDecoder", base=tmp_path, what="task") is json.decoder.JSONDecoder
    assert import_user_object("json:JSONDecoder.decode", base=tmp_path, what="task") is json.JSONDecoder.decode


def test_a_file_is_relative_to_base_and_runs_once(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    file = folder / "my-nets.py"  # no identifier: a path is not a module's name
    file.write_text(
        "from pathlib import Path\nwith open(__file__ + '.log', 'a') as f: f.write('x')\ndef build(): ...\n"
    )
    first = import_user_object("mine/my-nets.py:build", base=tmp_path, what="model.factory")
    assert import_user_object(f"{file}:build", base=Path("/"), what="task") is first
    assert import_user_object("my-nets.py:Path", base=folder, what="task") is Path
    assert file.with_name("my-nets.py.log").read_text() == "x"
    assert sys.modules[first.__module__].build is first


def test_files_of_one_name_are_two_modules_and_may_import_their_neighbours(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"neighbour_{folder}.py").write_text(f"NAME = {folder!r}\n")
        (tmp_path / folder / "net.py").write_text(f"from neighbour_{folder} import NAME\n")
    names = [import_user_object(f"{folder}/net.py:NAME", base=tmp_path, what="task") for folder in ("a", "b")]
    assert names == ["a", "b"]


def test_a_neighbour_never_shadows_an_installed_module(tmp_path: Path) -> None:
    (tmp_path / "fractions.py").write_text("raise RuntimeError('shadowed')\n")
    (tmp_path / "net.py").write_text("import fractions\n")
    sys.modules.pop("fractions", None)
    assert import_user_object("net.py:fractions", base=tmp_path, what="task").Fraction(1, 2) == 0.5


@pytest.mark.parametrize(
    "path", ["json", "json:", ":loads", "json:1", "a b:c", "json.:loads", "my_file:py:", "", "x.txt/:y"]
)
def test_a_malformed_path(path: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^task: .* is not an import path\. Write 'package\.module:attribute' or"):
        import_user_object(path, base=tmp_path, what="task")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package:x", "there is no module 'no_such_package'. Install it, or name a file"),
        ("json.decodr:x", "there is no module 'json.decodr'. Did you mean 'decoder'?"),
        ("json.decoder.deep:x", "there is no module 'json.decoder.deep'"),
        ("json:laods", "'json' has no 'laods'. Did you mean 'loads'?"),
        ("json:JSONDecoder.decod", "'json' has no 'decod'. Did you mean 'decode'?"),
        ("my_nte.py:build", "my_nte.py'. Did you mean 'my_net.py'?"),
        ("no_folder/my_net.py:build", "there is no file"),
    ],
)
def test_what_is_not_there(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text("")
    with pytest.raises(RecipeError) as caught:
        import_user_object(path, base=tmp_path, what="model.factory")
    assert str(caught.value).startswith("model.factory: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("1 / 0", ZeroDivisionError),
        ("import no_such_package", ModuleNotFoundError),
        ("from json import no_such_name", ImportError),
        ("def broken(:", SyntaxError),
        ("raise SystemExit(0)", SystemExit),
    ],
)
def test_a_module_that_fails_shows_its_own_error(code: str, cause: type[BaseException], tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(code)
    (tmp_path / "net.py").write_text(code)
    for path in ("users_package.nets:build", "net.py:build"):
        with pytest.raises(UserCodeError, match=cause.__name__) as caught:
            import_user_object(path, base=tmp_path, what="model.factory")
        assert type(caught.value.__cause__) is cause
    (tmp_path / "net.py").write_text("def build(): ...\n# mended, and longer than before\n")
    assert import_user_object("net.py:build", base=tmp_path, what="model.factory")() is None


def test_a_package_that_fails_inside_its_own_import_is_not_called_absent(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    package = tmp_path / "half_package"
    package.mkdir()
    (package / "__init__.py").write_text("import half_package.missing\n")
    with pytest.raises(UserCodeError, match=r"half_package\.missing"):
        import_user_object("half_package.nets:build", base=tmp_path, what="task")


def test_recipes_are_checked_without_torch() -> None:
    code = "import sys, headway.core.user_code, headway.optim, headway.model.builder; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
