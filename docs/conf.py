"""How Sphinx builds the documentation; `nox -s docs` runs it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import sampling_async  # Sphinx puts nothing on the path before this file has run

project = "sampling_async"
author = "The sampling_async developers"
copyright = author  # noqa: A001  Sphinx's name for it
release = version = sampling_async.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_llm.txt",
    # ours, in _extensions
    "docstrings",
    "autolinks",
    "keywords",
    "twins",
]
exclude_patterns = ["_build", "_extensions", "pictures/*.py"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", ".*"),  # the default role: single backticks in a docstring are a link where one is possible
    # Other projects, whose pages are not asked for: the documentation is built without a network.
    ("py:class", r"(array|asyncio|collections|datetime|decimal|enum|httpx|os)\b.*"),
    ("py:class", r"(pathlib|random|sqlite3|ssl|typing|uuid)\b.*"),
    ("py:class", r"(Abstract(Async)?ContextManager|ASGIApp|Callable\[\[\]|deque|Path|Random|UUID)"),
    ("py:class", r"(Converter|MeterProvider|TracerProvider)"),
    # Types of arguments that are private names for a few plain types; the text beside them says which values.
    (
        "py:class",
        r"(Currencies|CutWhen|FaultKind|Full|Goal|Missing|N|NotificationKind|OnMembers|Outcome|Output|Panel|Rates|Sleep|Value)",
    ),
    ("py:class", "_OfSettled"),
    (
        "py:class",
        r"(AnyIterable|AnyStore|HttpClient|IndexSource|MemberOptions|Recorder|SubQuotaRule|Transport|TruncatedPostal|Unpack)",
    ),
    ("py:class", r"sampling_async\..*_\w+\.(\w+\.)?(H|N_co|T|IndexSource|MemberOptions|Outcome|Recorder)"),
    # What stores pass to each other; nobody makes one.
    ("py:class", r"(sampling_async\.notifications\._facts\.)?(Backlog|Entry|Hit|Receipt|Settled|SurveyEnd)"),
    ("py:class", "'.*'"),  # values of a Literal
]
default_role = "py:obj"
smartquotes = False  # it would make a dash of the two hyphens of an option

# --- Markdown ---
myst_heading_anchors = 4  # [text](page.md#heading), as on the pages of a repository host
suppress_warnings = [
    "myst.strikethrough",  # Markdown twins know none, and none is used
    "ref.python",  # names that `sampling_async.sync` has too; without a module, the async ones are meant
]

# --- Reference ---
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # as they are written, and not what repr makes of them
autodoc_default_options = {"members": True}
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes in one list, not an entry each

# --- HTML ---
html_theme = "furo"
html_title = f"sampling_async {release}"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_js_files = ["accessible.js"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {"navigation_with_keys": True}

# --- For language models: llms.txt, llms-full.txt and a Markdown twin of each page ---
llms_txt_full_build = True  # llms-full.txt too
llms_txt_suffix_mode = "replace"  # tutorial.md beside tutorial.html
llms_txt_suppress_unknown_node_warnings = ["abbreviation"]  # the bare * of a signature
llms_txt_description = (
    "The asyncio client for External Sampling Services: quotas in, parallel bulk invites out, and exactly one "
    "outcome for every quota ID."
)
