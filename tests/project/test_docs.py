"""Examples of the README and of docs/ run unchanged; statements about the code are checked."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from operator import itemgetter
from runpy import run_path

import pytest
from cli_kit import command_tree
from docs_kit import PAGES, ROOT, examples_of, write_all
from wire import free_port

from sampling_async import ResultCode
from sampling_async.campaign import LESSONS, Lesson
from sampling_async.simulator import Simulator

README = (ROOT / "README.md").read_text()
WITH_EXAMPLES = [page for page in PAGES if examples_of(page)]


def of_page(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=of_page)
def test_the_scripts_of_a_page_run_in_order(page, monkeypatch, capsys, tmp_path):
    """They share a folder, because one may read the files of another. Each has a fresh simulator."""
    monkeypatch.chdir(tmp_path)
    port = free_port()  # always the same, because a journal belongs to one address
    for example in examples_of(page):
        if example.is_test or example.is_service:
            continue
        simulator = Simulator(seed=0, surveys=20, members=200)  # as `sampling-async simulate` makes it
        with simulator.serve(port=port) as url:
            monkeypatch.setenv("SAMPLING_BASE_URL", url)
            monkeypatch.setenv("SAMPLING_PANEL_GUID", simulator.panel_guid)
            monkeypatch.setenv("SAMPLING_API_KEY", simulator.api_key)
            path = tmp_path / example.name
            path.write_text(example.text)
            run_path(str(path), run_name="__main__")
        assert capsys.readouterr().out, example


@pytest.mark.parametrize(
    "page", [page for page in WITH_EXAMPLES if any(each.is_test for each in examples_of(page))], ids=of_page
)
def test_the_tests_of_a_page_pass(page, tmp_path):
    runs = defaultdict(list)
    for example in examples_of(page):
        if example.is_test or example.is_service:
            is_strict = "import pytest_asyncio" in example.text
            mode = "strict" if is_strict else "auto" if "asyncio_mode" in example.text else None
            runs[mode].append(example)
    for mode, examples in runs.items():
        folder = tmp_path / str(mode)
        folder.mkdir()
        for example in examples:
            (folder / example.name).write_text(example.text)
        # The plugin warns if it is not configured.
        scope = ("-o", "asyncio_default_fixture_loop_scope=function")
        runner = ("-p", "no:asyncio") if mode is None else ("-o", f"asyncio_mode={mode}", *scope)
        _must_pass(folder, sum(example.text.count("def test_") for example in examples), *runner)


def _must_pass(folder, tests: int, *runner: str) -> None:
    options = [
        *("-p", "no:cacheprovider", *runner),
        # Pytest rewrites the modules of a package that has a plugin. Where threads run already, parsing one for
        # that sometimes ends in a SystemError of Python 3.11.
        "--assert=plain",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert f"{tests} passed" in done.stdout, done.stdout + done.stderr


def test_every_example_has_its_own_file_name_for_the_type_checker(tmp_path):
    assert write_all(tmp_path) == len(list(tmp_path.iterdir())) > 20


def test_the_two_commands_of_the_readme_are_those_of_ci():
    assert 'python -m pip install -e ".[cli,simulator,panel]" && sampling-async demo' in README
    second = "python -m pip install nox && nox"
    assert second in README
    assert second in (ROOT / ".ci" / "run").read_text()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 160


COUNTS = {
    "clusters": 5,
    "durable": 4,
    "frameworks": 4,
    "schedulers": 3,
    "queues": 5,
    "sqlalchemy": 2,
    "prometheus": 1,
}


@pytest.mark.parametrize(("page", "count"), COUNTS.items())
def test_recipes_in_the_docs_are_parts_of_the_tested_recipes(page, count):
    text = (ROOT / "docs" / "howto" / f"{page}.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```py\n")[1:]]
    assert len(blocks) == count
    tests = ROOT / "tests"
    recipes = [
        path.read_text() for path in (*tests.glob("clusters/recipe_*.py"), *tests.glob("recipes/**/*.py"))
    ]
    for block in blocks:
        assert any(block in recipe for recipe in recipes)


def test_figures_of_the_readme_are_those_of_the_committed_runs():
    results = ROOT / "benchmarks" / "results"
    of_row = {"quota IDs": "scoreboard", "CPU": "speed", "matching": "matching"}
    rows = [line for line in README.splitlines() if line.startswith("| ") and "`python benchmarks" in line]
    assert len(rows) == len(of_row)
    for row in rows:
        what, measured, _ = row.strip("| ").split(" | ")
        page = (
            results / f"{next(name for start, name in of_row.items() if what.startswith(start))}.md"
        ).read_text()
        for number in re.findall(r"\d[\d,.]*\d", measured.replace("99th", "")):
            assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,]|\.\d)", page), f"{number}: {what}"


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_links_point_to_existing_files(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link


@pytest.mark.parametrize(
    ("script", "picture"), [("dashboard", "dashboard.svg"), ("fan_out", "fan-out.svg"), ("rooms", "rooms.svg")]
)
def test_pictures_equal_the_output_of_their_scripts(script, picture, monkeypatch):
    folder = ROOT / "docs" / "pictures"
    monkeypatch.syspath_prepend(folder)
    assert import_module(script).picture() == (folder / picture).read_text()


def commands_in_pages():
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
            for found in re.finditer(r"sampling-async (\S+)([^|\n]*)", block):
                yield f"{of_page(page)}: {found[0].strip()}", found[1], found[2].partition("  #")[0]


@pytest.mark.parametrize(
    ("name", "rest"), [pytest.param(*each[1:], id=each[0]) for each in commands_in_pages()]
)
def test_commands_in_the_docs_exist_with_their_options(name, rest):
    command = command_tree().commands[name]
    if hasattr(command, "commands"):  # a group, whose command is the next word
        # A campaign has a command for everything but the first one, which is `run`.
        command = command.commands.get(rest.split()[0]) or command.commands["run"]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    assert set(re.findall(r"(?<=\s)--[a-z][\w-]*", rest)) <= known


def test_the_page_of_refusals_has_each_result_code_once_and_says_what_campaigns_do():
    page = (ROOT / "docs" / "howto" / "refusals.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\| \d.*$", page, re.MULTILINE)
    ]
    codes = {name: code for name, code in vars(ResultCode).items() if name.isupper()}
    assert [(name, int(code)) for code, name, *_ in rows] == sorted(codes.items(), key=itemgetter(1))
    concerns = {Lesson.STOP: "all", Lesson.PAIR: "", Lesson.MEMBER_SURVEY: "member and survey"}
    concerns[Lesson.LATER] = "the same, later"
    for code, _, means, advice, others in rows:
        assert means
        assert advice
        if code != "1":
            lesson = LESSONS[int(code)].lesson
            assert others.partition(",")[0] == concerns.get(lesson, str(lesson)).partition(",")[0], code


def test_each_question_that_the_search_is_checked_with_has_a_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    for page in import_module("check_search").QUESTIONS.values():
        assert (ROOT / "docs" / f"{page}.md").is_file(), page


@pytest.fixture
def generated(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("generated")


def test_every_generated_text_has_content_and_a_page(generated):
    for name, lines in generated.GENERATED.items():
        assert "".join(lines()), name
        assert any(f"<!-- generated: {name} -->" in page.read_text() for page in PAGES), name


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_generated_text_is_committed_so_that_pages_can_be_read_without_a_build(page, generated):
    assert generated.filled(page.read_text()) == page.read_text(), "run: python docs/generated.py"


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_a_page_of_directives_says_where_its_text_is(page):
    """A line that begins with % is text where Markdown is shown, and a comment where the pages are built."""
    text = page.read_text()
    if re.search(r"^```\{(eval-rst|include|literalinclude)\}", text, flags=re.MULTILINE):
        noted = "".join(line for line in text.splitlines() if line.startswith("% "))
        included = re.findall(r"^```\{(?:literal)?include\} (\S+)", text, flags=re.MULTILINE)
        assert included or re.search(r"\]\(\.\./\.\./sampling_async/", noted)
        assert all(f"]({file})" in text for file in included)
