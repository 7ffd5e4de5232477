"""`inspect`, `verify` and `cat` on RecordIO files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run, text_of
from recordio_files import COUNT, GOLDEN, SAMPLES, create


@pytest.fixture
def path(tmp_path: Path) -> str:
    return create(tmp_path / "x.recordio", dialect="go", compression="gzip", max_chunk_size=30_000)


def test_inspect_shows_dialect_and_chunks(path: str) -> None:
    [facts] = json.loads(text_of("inspect", "--json", path))
    assert (facts["format"], facts["samples"], facts["dialect"]) == ("recordio", COUNT, "go")
    assert facts["compression"] == "gzip" and facts["checksums"] == "CRC-32 of every chunk"
    assert facts["decoded_size_bytes"] == sum(map(len, SAMPLES)) + 4 * COUNT
    shown = text_of("inspect", path)
    assert "go" in shown and f"{facts['chunks']:,}, the largest" in shown


def test_cat_and_verify(path: str) -> None:
    assert run("cat", path, "4", "0:20").stdout == SAMPLES[4] + b"".join(SAMPLES[:20])
    assert f"{COUNT} samples" in text_of("verify", path)


def test_verify_names_damaged_samples() -> None:
    found = json.loads(
        text_of(
            "verify",
            "--json",
            str(GOLDEN / "py" / "corrupt_payload.recordio"),
            str(GOLDEN / "go" / "trunc_body.recordio"),
            code=1,
        )
    )
    assert [(e["index"], e["error"]) for e in found["damaged"]] == [
        (18, "truncated"), (6, "checksum"), (7, "checksum"), (8, "checksum"),
    ]  # fmt: skip
    assert found["unreadable"] == [] and found["samples"] == 20 + 19
    assert "chunk 2" in text_of("verify", str(GOLDEN / "py" / "corrupt_payload.recordio"), code=1)
