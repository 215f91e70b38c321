"""Files that several processes write at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlhf_core.system.files import write_text


def test_writers_with_one_process_id_do_not_meet(tmp_path: Path) -> None:
    """Machines that share a folder may have equal process ids, as the threads here have."""
    texts = [str(number) * 5000 for number in range(8)]
    with ThreadPoolExecutor(len(texts)) as pool:
        for _ in range(25):
            assert list(pool.map(lambda text: write_text(tmp_path / "index.html", text), texts)) == [
                None
            ] * len(texts)
            assert (tmp_path / "index.html").read_text() in texts
    assert [file.name for file in tmp_path.iterdir()] == ["index.html"]
