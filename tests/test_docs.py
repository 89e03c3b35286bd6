"""The documentation: its examples run, its links lead somewhere, its tables and commands are true."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from fedkper.cli import main
from fedkper.cli_data import COMMANDS as DATA_COMMANDS
from fedkper.cli_export import COMMANDS as EXPORT_COMMANDS
from fedkper.cli_federation import COMMANDS as FEDERATION_COMMANDS
from fedkper.cli_federation import GROUP as FEDERATION_GROUP
from fedkper.cli_paper import COMMANDS as PAPER_COMMANDS
from fedkper.cli_report import COMMANDS as REPORT_COMMANDS
from fedkper.cli_run import COMMANDS, Run
from fedkper.cli_sweep import COMMANDS as SWEEP_COMMANDS
from fedkper.method import Method
from fedkper.methods import METHODS, parse
from fedkper.ranges import Range, convert

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
OF_METHODS = sorted([*(ROOT / "docs").glob("*method*.md"), *(ROOT / "docs" / "methods").glob("*.md")])
NEW_METHOD = (ROOT / "docs" / "new-method.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", NEW_METHOD, re.MULTILINE | re.DOTALL)
NAMES = [re.findall(r"^class (\w+)", code, re.MULTILINE)[-1] for code in EXAMPLES]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
every_method = pytest.mark.parametrize("name", METHODS)
every_example = pytest.mark.parametrize(("code", "name"), list(zip(EXAMPLES, NAMES, strict=True)), ids=NAMES)


def options(command: Any) -> set[str]:
    return {"--help", *("--" + f.name.replace("_", "-") for f in dataclasses.fields(command))}


def table(name: str) -> dict[str, list[str]]:
    """The table of fields of a method's page: field -> default, range, source."""
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    part = text.partition("## Fields\n")[2].partition("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line.strip().strip("|").strip()) for line in part.splitlines()]
    return {row[0].strip("`"): row[1:] for row in rows if row[0].startswith("`") and len(row) > 1}


def allowed(hint: Any) -> str:
    """A field's range in the words of a page, which are those of a refusal."""
    if hint is bool:
        return "true, false"
    if get_origin(hint) is Literal:
        return ", ".join(get_args(hint))
    return next((str(a) for a in get_args(hint) if isinstance(a, Range)), "any")


def saved(code: str, folder: Path) -> Path:
    path = folder / "mine.py"
    path.write_text(code, encoding="utf-8")
    return path


def try_out(method: str, folder: Path, workers: int = 1) -> str:
    """One short round with a method. -> clients.csv"""
    words = ["run", "--method", method, "--rounds", "1", "--epochs", "1", "--batch", "64", "--clients", "5"]
    assert main([*words, "--workers", str(workers), "--out", str(folder)]) == 0
    return (folder / "clients.csv").read_text()


# --- the examples of new-method.md ---------------------------------------------------------------------


@every_example
def test_an_example_is_short_and_runs(code: str, name: str, tmp_path: Path) -> None:
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) < 30
    try_out(f"{saved(code, tmp_path)}:{name}", tmp_path / "run")


def test_an_example_gives_the_same_on_two_workers(tmp_path: Path) -> None:
    path = saved(EXAMPLES[1], tmp_path)
    one = try_out(f"{path}:{NAMES[1]}", tmp_path / "one")
    assert try_out(f"{path}:{NAMES[1]}", tmp_path / "two", workers=2) == one


def test_the_first_example_takes_its_field_and_is_fedavg_at_0(tmp_path: Path) -> None:
    path = saved(EXAMPLES[0], tmp_path)
    assert dataclasses.asdict(parse(f"{path}:{NAMES[0]}:strength=0.3")) == {"strength": 0.3}
    smooth = try_out(f"{path}:{NAMES[0]}:strength=0", tmp_path / "smooth")
    assert smooth == try_out("fedavg", tmp_path / "fedavg")


def test_every_function_of_a_method_is_explained() -> None:
    explained = re.findall(r"^\| `(\w+)` \|", NEW_METHOD, re.MULTILINE)
    assert sorted(explained) == sorted(n for n, f in vars(Method).items() if callable(f) and n[0] != "_")


# --- the pages of the methods --------------------------------------------------------------------------


@every_method
def test_the_table_of_fields_is_true(name: str) -> None:
    fields, hints = table(name), get_type_hints(METHODS[name], include_extras=True)
    assert list(fields) == [f.name for f in dataclasses.fields(METHODS[name])]
    for f in dataclasses.fields(METHODS[name]):
        default, limits, source = fields[f.name]
        assert convert(default, type(f.default), f.name) == f.default
        assert limits == allowed(hints[f.name])
        assert source


@every_method
def test_a_page_has_its_command_and_its_curve(name: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert f"fedkper run --method {name} " in text
    assert f"![curves](../pictures/methods-{name}.png)" in text


def test_every_page_of_a_method_is_in_the_index() -> None:
    pages = {p.stem for p in (ROOT / "docs" / "methods").glob("*.md")}
    index = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert pages == set(METHODS) == set(re.findall(r"^\| \[(\w+)\]\(methods/\1\.md\)", index, re.MULTILINE))


# --- all pages -----------------------------------------------------------------------------------------


@every_page
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text) + re.findall(r'<img[^>]*src="([^"]+)"', text)
    missing = [t for t in targets if not re.match(r"\w+:", t) and not (page.parent / t).exists()]
    assert missing == []


@every_page
def test_commands_have_only_options_that_exist(page: Path) -> None:
    """In a line that starts a command, and on the pages of the methods anywhere."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    known = {
        **COMMANDS,
        **EXPORT_COMMANDS,
        **REPORT_COMMANDS,
        **{f"data {n}": c for n, c in DATA_COMMANDS.items()},
    }
    known |= SWEEP_COMMANDS
    known |= {f"paper {n}": c for n, c in PAPER_COMMANDS.items()}
    known |= FEDERATION_COMMANDS | {f"federation {n}": c for n, c in FEDERATION_GROUP.items()}
    names = r"data \w+|paper \w+|federation \w+|link|site|run|compare|sweep|summary|export|predict|report"
    for command, words in re.findall(rf"\bfedkper ({names})\b([^`\n]*)", text):
        used = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", words))
        assert used <= options(known[command]), f"fedkper {command}{words}"
    if page in OF_METHODS:
        used = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
        assert used <= options(Run) | {"--methods", "--seeds"}


@every_page
def test_commands_name_methods_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for words in re.findall(r"\bfedkper (?:run|compare|sweep)\b([^`\n]*)", text):
        named = re.findall(r"--method[ =](\S+)", words)
        for several in re.findall(r"--methods((?: [^-\s]\S*)+)", words):
            named += several.split()
        for method in named:
            assert ".py:" in method or parse(method)
