"""Partitioned directories: names, values, and what is refused."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.arrow import hive
from ffserve.errors import FormatError, MissingFile, UsageError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(st.lists(st.tuples(TEXT, st.none() | TEXT), min_size=1, max_size=3))
def test_names_and_values_come_back(pairs: list[tuple[str, str | None]]) -> None:
    names, values = zip(*pairs, strict=True)
    directory = hive.directory_of(names, values)
    assert "\0" not in directory
    assert [hive.parse(part) for part in directory.split("/")] == pairs or hive.NULL in values


def test_names_are_those_of_spark() -> None:
    assert hive.directory_of(["a b"], ["x/y:z=%é ü"]) == "a b=x%2Fy%3Az%3D%25é ü"
    assert hive.directory_of(["k", "l"], [None, ""]) == f"k={hive.NULL}/l={hive.NULL}"
    assert hive.parse("plain") is None and hive.parse("=x") is None


@pytest.mark.parametrize(
    ("texts", "type"),
    [
        (["1", "08", "-7"], pa.int32()),
        (["1", "2147483648"], pa.int64()),
        (["1", "9223372036854775808"], pa.decimal128(38, 0)),
        (["1", "1e3"], pa.float64()),
        (["2024-01-31"], pa.date32()),
        (["2024-01-31", "2024-01-31 10:00:00.5"], pa.timestamp("us", "UTC")),
        (["2024-01-31", "1"], pa.string()),
        (["2024-13-01"], pa.string()),
        (["1d", "nan"], pa.string()),
        ([None, "1"], pa.int32()),
        ([None], pa.string()),
    ],
)
def test_inferred_types(texts: list[str | None], type: object) -> None:
    assert hive.infer_type(texts) == type


def test_values() -> None:
    def value(text: str | None, type: object) -> object:
        return hive.convert_value("k", text, type, "Europe/Amsterdam", "/f").as_py()

    assert value("007", pa.string()) == "007" and value("007", pa.int32()) == 7
    assert value(None, pa.int32()) is None
    assert value("1.5", pa.decimal128(5, 2)) == Decimal("1.50")
    assert value("true", pa.bool_()) is True
    assert value("2024-01-31", pa.date32()) == datetime.date(2024, 1, 31)
    moment = value("2024-01-31 10:00:00", pa.timestamp("us", "UTC"))
    assert moment == datetime.datetime(2024, 1, 31, 9, tzinfo=datetime.timezone.utc)
    for text, type in (
        ("x", pa.int32()),
        ("300", pa.int8()),
        ("9" * 20, pa.int64()),  # an OverflowError
        ("maybe", pa.bool_()),
    ):
        with pytest.raises(
            FormatError, match=f"/f: the value '{text}' of the partition column 'k'"
        ):
            value(text, type)


def test_files(tmp_path: Path) -> None:
    for place in ("k=1/l=a/x", "k=1/l=b/x", "k=2/l=a/y", "_SUCCESS", ".x.crc", "_temporary/k=1/z"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("12")
    found = hive.find_files([f"file:{tmp_path}"])
    assert [(Path(f.path).relative_to(tmp_path).as_posix(), f.size) for f in found] == [
        ("k=1/l=a/x", 2), ("k=1/l=b/x", 2), ("k=2/l=a/y", 2)
    ]  # fmt: skip
    assert found[0].values == (("k", "1"), ("l", "a"))
    assert [f.values for f in hive.find_files([str(tmp_path / "k=*")])] == [
        (("l", "a"),), (("l", "b"),), (("l", "a"),)
    ]  # fmt: skip
    based = hive.find_files([str(tmp_path / "k=1")], base=str(tmp_path))
    assert based == [f for f in found if "k=1" in f.path]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="no such file"):
        hive.find_files([str(tmp_path / "none")])
    with pytest.raises(MissingFile, match="no file matches"):
        hive.find_files([str(tmp_path / "*.x")])
    with pytest.raises(UsageError, match="'hdfs' is not supported"):
        hive.local_path("hdfs://host/x")
    with pytest.raises(UsageError, match="'hdfs' is not supported"):
        hive.local_path("hdfs:/x")
    with pytest.raises(UsageError, match="names the host 'host'"):
        hive.local_path("file://host/x")
    assert hive.local_path("file:///a%20b") == "/a%20b", "Hadoop's paths are not escaped"
    (tmp_path / "k=1").mkdir()
    (tmp_path / "k=1" / "x").touch()
    (tmp_path / "y").touch()
    with pytest.raises(FormatError, match="differ"):
        hive.find_files([str(tmp_path)])
    (tmp_path / "y").unlink()
    (tmp_path / "plain").mkdir()
    with pytest.raises(FormatError, match="not named column=value"):
        hive.find_files([str(tmp_path)])
