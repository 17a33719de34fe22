"""Take pictures of a campaign's report, as docs/howto/campaign-report.md shows it.

    python benchmarks/campaign.py --only campaign --members 20000 --surveys 400 --outage 20 --keep night
    python docs/pictures/report.py night/campaign.ledger

It takes Chromium, Pillow, and pypdfium2, which renders the print.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pypdfium2
from PIL import Image

from sampling_async.campaign import Campaign

HERE: Final = Path(__file__).parent
DESKTOP, PHONE, HEIGHT, SCALE = 1000, 390, 1500, 0.8  # pixels, and how much smaller the pictures are
PAGES, GAP = (0, 1, -2), 10  # the last but one has charts over time
PAGE_SCALE: Final = 60 / 72  # a page of 8.5 by 11 inches gets 510 by 660 pixels
# A window cannot be as narrow as a phone, but a frame can.
FRAME: Final = (
    f'<body style="margin: 0"><iframe src="{{}}" width="{PHONE}" height="{HEIGHT}" style="border: 0">'
)
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")


def chromium(folder: Path, page: str, option: str) -> None:
    """Let Chromium take a picture of a page, or print it."""
    program = next(filter(None, map(shutil.which, BROWSERS)))
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-pdf-header-footer")
    size, profile = f"--window-size={DESKTOP},{HEIGHT}", f"--user-data-dir={folder / 'profile'}"
    command = (program, *options, size, profile, option, (folder / page).as_uri())
    subprocess.run(command, check=True, capture_output=True)


def smaller(file: Path, width: int) -> Image.Image:
    """Return the left part of a picture, scaled down."""
    picture = Image.open(file).convert("RGB").crop((0, 0, width, HEIGHT))
    return picture.resize((round(width * SCALE), round(HEIGHT * SCALE)), Image.Resampling.LANCZOS)


def print_of(file: Path) -> Image.Image:
    """Return some pages of a PDF file side by side."""
    document = pypdfium2.PdfDocument(file)
    pages = [document[number % len(document)].render(scale=PAGE_SCALE).to_pil() for number in PAGES]
    width, height = pages[0].size
    picture = Image.new("RGB", (len(PAGES) * (width + GAP) - GAP, height), "#999")
    for number, page in enumerate(pages):
        picture.paste(page, (number * (width + GAP), 0))
    return picture


async def write_report(ledger: Path, folder: Path) -> None:
    """Write the report of a campaign, with a title."""
    campaign = Campaign(None, ledger=ledger)
    members = (await campaign.summary()).members
    await campaign.write(folder, title=f"A night of {members:,} members")


def main(ledger: Path) -> None:
    """Write the three pictures."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(write_report(ledger, folder))
        take(folder / "report.html", "report")
        chromium(folder, "report.html", f"--print-to-pdf={folder / 'report.pdf'}")
        save(print_of(folder / "report.pdf"), "report-print")


def take(page: Path, name: str) -> None:
    """Take the pictures of a page on a desktop and on a phone."""
    folder, phone = page.parent, page.with_name("phone.html")
    phone.write_text(FRAME.format(page.name))
    for file, kind, width in ((page, "desktop", DESKTOP), (phone, "phone", PHONE)):
        picture = folder / f"{kind}.png"
        chromium(folder, file.name, f"--screenshot={picture}")
        save(smaller(picture, width), f"{name}-{kind}")


def save(picture: Image.Image, name: str) -> None:
    """Save a picture beside this script."""
    # Coverage, so that colours of which there is little stay apart.
    few = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
