"""Sources of panels: streams of other libraries, changing batches, no extra installed."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from panel_kit import (
    GENDER,
    MALE,
    MEN,
    PARTICIPATIONS,
    divide,
    generated_panel,
    panel_of,
    survey,
)

from sampling_async import InvalidRequestError
from sampling_async.matching import (
    Counts,
    PanelMatcher,
    QuotaIndex,
    Sample,
    TopK,
)


def test_a_panel_needs_unique_columns_and_codes_where_members_are_named():
    index = QuotaIndex([survey(MEN)])
    with pytest.raises(InvalidRequestError, match=r"an Arrow stream.*not list"):
        PanelMatcher(index).run([{GENDER: MALE}]).read_all()
    with pytest.raises(InvalidRequestError, match="several columns '1001007'"):
        PanelMatcher(index).run(pa.table([[1], [2]], names=[str(GENDER)] * 2)).read_all()
    with pytest.raises(InvalidRequestError, match="it has the columns '1001007', 'id'"):
        PanelMatcher(index, TopK(2)).run(pa.table({str(GENDER): [MALE], "id": ["a"]})).read_all()


def test_a_data_frame_that_arrow_does_not_take_is_refused_without_its_values():
    pandas = pytest.importorskip("pandas")
    index = QuotaIndex([survey(MEN)])
    mixed = pandas.DataFrame({"member_code": [524289, "SECRET"], str(GENDER): [MALE, MALE]})
    with pytest.raises(
        InvalidRequestError, match="values of its column 'member_code' have several types"
    ) as caught:
        PanelMatcher(index).run(mixed).read_all()
    text_of_error = "".join(traceback.format_exception(caught.value))
    assert not any(code in text_of_error for code in ("524289", "SECRET"))


def test_a_part_is_a_stream_or_an_iterable_of_batches():
    matcher = PanelMatcher(QuotaIndex([survey(MEN)]))
    part = pa.table({str(GENDER): [MALE, MALE]})
    for given in (part, part.to_batches(), part.to_reader(), part.to_batches()[0], iter(part.to_batches())):
        (made,) = matcher.map_batches(given)
        assert made.column("certain").to_pylist() == [2]
    with pytest.raises(InvalidRequestError, match=r"an Arrow stream.*not dict"):
        list(matcher.map_batches([{GENDER: MALE}]))


def test_columns_may_change_from_batch_to_batch():
    index = QuotaIndex([survey(MEN)])
    batches = [
        pa.record_batch({str(GENDER): pa.array([MALE])}),
        pa.record_batch({str(GENDER): pa.array([[MALE, 4]])}),
        pa.record_batch({"member_code": pa.array(["a"])}),
    ]
    (made,) = PanelMatcher(index).map_batches(batches)
    assert made.column("certain").to_pylist() == [2]


def test_runs_of_one_matcher_at_the_same_time_do_not_disturb_each_other(monkeypatch):
    divide(monkeypatch, chunk=64)
    codes = [f"M{at}" for at in range(150)]
    parts = [panel_of([{GENDER: each}] * 150, member_code=codes) for each in (MALE, MALE + 1, MALE)]
    matcher = PanelMatcher(QuotaIndex([survey(MEN)]), TopK(1))
    runs = list(zip(*(matcher.map_batches(part.to_batches()) for part in parts), strict=True))
    assert len(runs) == 2
    for at, certain in enumerate((1, 0, 1)):
        assert [n for together in runs for n in together[at].column("certain").to_pylist()] == [certain] * 150


@pytest.mark.parametrize("library", ["polars", "pandas", "duckdb", "batches", "reader"])
def test_streams_of_many_libraries_are_accepted(generated, library):
    index, panel = generated
    plain = pa.table(
        {
            name: column
            for name, column in zip(panel.column_names, panel.columns, strict=True)
            if not pa.types.is_list(column.type)
        }
    )
    matcher = PanelMatcher(index, TopK(3))
    if library == "polars":
        stream = pl.from_arrow(plain)
        assert (
            PanelMatcher(index, Sample(3)).run(stream).read_all()
            == PanelMatcher(index, Sample(3)).run(plain).read_all()
        )
        with pytest.raises(InvalidRequestError, match=r"not LazyFrame: collect\(\) it first"):
            matcher.run(stream.lazy()).read_all()
    elif library == "pandas":
        stream = plain.to_pandas()  # pandas turns whole numbers with gaps into floats
        assert "float64" in set(map(str, stream.dtypes))
    elif library == "duckdb":
        stream = duckdb.sql("SELECT * FROM plain")
    else:
        stream = iter(plain.to_batches()) if library == "batches" else plain.to_reader()
    assert matcher.run(stream).read_all() == matcher.run(plain).read_all()


@pytest.fixture(scope="module")
def generated():
    return generated_panel()


def test_matching_works_without_the_extra_and_a_panel_names_it():
    script = """
import sys
sys.modules["pyarrow"] = None
from sampling_async.matching import QuotaIndex
try:
    from sampling_async.matching import PanelMatcher
except ImportError as exc:
    print(exc)

"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 'pyarrow: python -m pip install "sampling-async[panel]"' in ran.stdout


def test_matching_does_not_import_pandas(generated, tmp_path):
    index, panel = generated
    taken = pa.array([[{"survey_id": 1, "wave_id": 1, "status_id": 1}]] * len(panel), PARTICIPATIONS)
    panel = panel.append_column("exclude_surveys", pa.array([[100, 101]] * len(panel)))
    panel = panel.append_column("participations", taken)
    with pa.OSFile(str(tmp_path / "panel"), "wb") as file, pa.ipc.new_stream(file, panel.schema) as writer:
        writer.write_table(panel)
    for output in (Counts(), TopK(5)):
        (tmp_path / "matcher").write_bytes(pickle.dumps(PanelMatcher(index, output)))
        script = """
import pickle, sys
import pyarrow
with open("matcher", "rb") as file, pyarrow.OSFile("panel") as panel:
    assert pickle.load(file).run(pyarrow.ipc.open_stream(panel)).read_all().num_rows
print("pandas" in sys.modules)
"""
        given = [sys.executable, "-c", script]
        ran = subprocess.run(given, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert ran.stdout == "False\n"
