"""Check that the search of the built pages puts the page that answers a question first.

    python docs/check_search.py docs/_build/html

types each question into the search page, in headless Chromium, and prints at which place the page came. Without
Chromium it says so, and checks nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

QUESTIONS = {
    "rate limit": "explanation/limits",
    "rate limit 429": "explanation/limits",
    "retry the failed ones": "howto/retry",
    "retry": "howto/retry",
    "test without the service": "howto/testing",
    "data frame": "howto/data-frames",
    "pandas": "howto/data-frames",
    "Parquet": "howto/data-frames",
    "without async": "howto/scripts",
    "morning report": "howto/campaign-report",
    "how much did we earn": "howto/campaign-report",
    "email": "howto/campaigns",
    "gdpr": "howto/erase",
    "custom header": "howto/http-client",
    "Docker": "howto/deploy",
    "Kubernetes": "howto/deploy",
    "systemd": "howto/deploy",
    "Django": "howto/frameworks",
    "Celery": "howto/frameworks",
    "Airflow": "howto/schedulers",
    "Dagster": "howto/schedulers",
    "Jupyter": "howto/jupyter",
    "Prometheus": "howto/prometheus",
    "Kafka": "howto/queues",
    "Redis": "howto/queues",
    "PostgreSQL": "howto/several-hosts",
    "two hosts": "howto/several-hosts",
    "SQLAlchemy panel": "howto/sqlalchemy",
    "which of my members fit?": "howto/panels",
    "why was this refused?": "howto/refusals",
    "survey taken 38": "howto/refusals",
    "what does unknown mean": "promise",
    "costs and sizes": "howto/sizes",
}
"""What people come with, and the page that answers it."""

_LINK = re.compile(r'<li class="kind-[^"]*"[^>]*><a href="([^"#]+?)\.html')
_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--virtual-time-budget=20000", "--dump-dom"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing: only the answer is of interest."""


def pages_found(browser: str, address: str, question: str) -> list[str]:
    """Return the pages that the search lists for a question, each once, the first first."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [browser, *_FLAGS, f"--user-data-dir={folder}", f"{address}/search.html?q={quote(question)}"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return list(dict.fromkeys(map(unescape, _LINK.findall(shown))))


def main(root: str) -> int:
    """Print the place of each page; return how many are not first."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    if browser is None:
        print("the search was not checked: there is no Chromium here")
        return 0
    missing = [page for page in QUESTIONS.values() if not Path(root, f"{page}.html").is_file()]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ask = partial(pages_found, browser, f"http://127.0.0.1:{server.server_port}")
    with ThreadPoolExecutor(2) as side_by_side:
        found = dict(zip(QUESTIONS, side_by_side.map(ask, QUESTIONS), strict=True))
    server.shutdown()
    not_first = 0
    for question, page in QUESTIONS.items():
        place = found[question].index(page) + 1 if page in found[question] else None
        not_first += place != 1
        before = "" if place == 1 else f"  after {found[question][: (place or 6) - 1]}"
        print(f"{place or 'not found':>9}  {question}: {page}{before}")
    print(
        *(f"no such page: {page}" for page in missing),
        f"{not_first} questions without their page first",
        sep="\n",
    )
    if "<h1" not in Path(root, "search.html").read_text():  # the theme gives it none
        print("the search page has no h1")
        not_first += 1
    return not_first


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1])))
