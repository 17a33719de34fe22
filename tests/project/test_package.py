"""What is published: the metadata, the page of the index, and both archives."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from datetime import date
from importlib.util import find_spec
from zipfile import ZipFile

import pytest
from docs_kit import ROOT

import sampling_async

CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOLS = CONFIGURATION["project"], CONFIGURATION["tool"]
SITE = PROJECT["urls"]["Documentation"]
README = (ROOT / "README.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CANNOT_BUILD = [
    name for name in ("build", "hatchling", "hatch_fancy_pypi_readme", "twine") if find_spec(name) is None
]


def page_behind(url):
    """Return the file of the repository that the built pages show at an address of theirs."""
    path = url.removeprefix(SITE).partition("#")[0]
    if path.startswith("_images/"):
        return ROOT / "docs" / "pictures" / path.removeprefix("_images/")
    return ROOT / "docs" / path.replace(".html", ".md")


def links_of(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_links_and_picture_of_the_readme_work_in_a_clone():
    links = links_of(README)
    assert len(links) > 15
    for link in links:
        assert (ROOT / link.partition("#")[0]).is_file(), link


def test_in_the_archives_they_are_absolute_because_an_index_has_no_repository():
    shown = README
    for each in TOOLS["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(each["pattern"], each["replacement"], shown)
    assert len(links_of(shown)) == len(links_of(README))
    for link in links_of(shown):
        assert link.startswith(SITE), link
        assert page_behind(link).is_file(), link


def test_project_urls_are_pages_of_the_site():
    assert {"Documentation", "Changelog", "Security"} <= set(PROJECT["urls"])
    for url in set(PROJECT["urls"].values()) - {SITE}:
        assert page_behind(url).is_file(), url


def test_classifiers_stand_once_and_claim_no_system_that_was_not_tried():
    classifiers = PROJECT["classifiers"]
    assert len(set(classifiers)) == len(classifiers)
    systems = [each for each in classifiers if each.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]


def test_the_changelog_has_this_version_under_a_short_unreleased_part():
    heads = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", CHANGELOG, flags=re.MULTILINE)
    assert heads[0] == ("Unreleased", "")
    version, day = heads[1]
    assert version == sampling_async.__version__
    assert date.fromisoformat(day)
    unreleased = CHANGELOG.partition("## [Unreleased]")[2].partition("\n## [")[0]
    assert len(unreleased.splitlines()) <= 40


@pytest.mark.skipif(bool(CANNOT_BUILD), reason=f"missing: {', '.join(CANNOT_BUILD)}; nox -s package")
def test_the_archives_pass_the_strict_check_and_the_wheel_installs(tmp_path):
    dist = tmp_path / "dist"
    built = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(built, check=True, capture_output=True)
    archives = sorted(map(str, dist.iterdir()))
    checked = [sys.executable, "-m", "twine", "check", "--strict", *archives]
    done = subprocess.run(checked, check=False, capture_output=True, text=True)
    assert done.stdout.count("PASSED") == len(archives) == 2, done.stdout + done.stderr

    source, wheel = next(dist.glob("*.tar.gz")), next(dist.glob("*.whl"))
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "docs/index.md"} <= inside
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "sampling_async/py.typed" in names
    assert all(name.startswith(("sampling_async/", "sampling_async-")) for name in names)

    venv.create(tmp_path / "venv", with_pip=True)
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
