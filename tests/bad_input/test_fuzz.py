"""More than two hundred inputs, malformed by construction: each exits 2 and says where."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from eagle_batch.cli import main
from eagle_batch.errors import ExitCode, HeadError
from tests.data.support import BASE, topics, write_model, write_pipeline

SEEDS = range(80)
#: A head takes longer to make.
HEAD_SEEDS = range(60)
#: Nothing takes such a value.
NONSENSE: dict[str, Any] = {"oops": [1]}


def refused(path: Path, *names: str) -> None:
    """`validate` and `plan` exit with 2, name the file and show no traceback."""
    for command in ("validate", "plan"):
        result = CliRunner().invoke(main, [command, str(path)])
        shown = f"{path.read_bytes()[:2000]!r}\n{result.output}"
        assert result.exit_code == ExitCode.BAD_INPUT, shown
        assert isinstance(result.exception, SystemExit), shown
        assert "Traceback" not in result.output
        assert any(name in result.output for name in names), shown


def leaves(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    found: list[tuple[Any, ...]] = []
    for key, value in items:
        nested = isinstance(value, dict | list)
        found += [(*prefix, key), *(leaves(value, (*prefix, key)) if nested else [])]
    return found


def parent_of(data: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        data = data[key]
    return data


def bad_value(chance: random.Random, data: dict[str, Any]) -> str:
    place = chance.choice([p for p in leaves(data) if isinstance(p[-1], str)])
    parent_of(data, place)[place[-1]] = NONSENSE
    return yaml.safe_dump(data)


def unknown_key(chance: random.Random, data: dict[str, Any]) -> str:
    place = chance.choice([p for p in leaves(data) if isinstance(p[-1], str)])
    parent_of(data, place)["x" + "".join(chance.sample("abcdefgh", 5))] = 1
    return yaml.safe_dump(data)


def repeated_key(chance: random.Random, data: dict[str, Any]) -> str:
    return yaml.safe_dump(data) + f"{chance.choice(sorted(data))}: 1\n"


def open_bracket(chance: random.Random, data: dict[str, Any]) -> str:
    lines = yaml.safe_dump(data).splitlines()
    lines.insert(chance.randrange(len(lines)), "k: [" + chance.choice(["", "{", "'", '"']))
    return "\n".join(lines)


def control_character(chance: random.Random, data: dict[str, Any]) -> str:
    text = yaml.safe_dump(data)
    place = chance.randrange(len(text))
    return text[:place] + chance.choice("\x00\x01\x07\x1b\x7f") + text[place:]


def broken_pipeline(seed: int, text: str) -> str:
    chance = random.Random(seed)
    harm: Callable[[random.Random, dict[str, Any]], str] = chance.choice(
        [bad_value, unknown_key, repeated_key, open_bracket, control_character]
    )
    return harm(chance, yaml.safe_load(text))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_malformed_pipeline_is_refused(tmp_path: Path, seed: int) -> None:
    path = write_pipeline(tmp_path)
    path.write_text(broken_pipeline(seed, path.read_text()))
    refused(path, str(path))


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(topics(50), sink)
    return sink.getvalue()


PARQUET = parquet()
LINES = [json.dumps({"id": n, "topic": f"topic {n}"}).encode() for n in range(20)]


def broken_parquet(chance: random.Random) -> bytes:
    """Without its end there is no footer; without its magic it is no Parquet."""
    size = len(PARQUET)
    return chance.choice(
        [
            lambda: PARQUET[: chance.randrange(size)],
            lambda: PARQUET[:-4] + chance.randbytes(4),
            lambda: PARQUET[: size - chance.randrange(9, 200)] + PARQUET[-8:],
            lambda: chance.randbytes(chance.randrange(1, 500)),
            lambda: PARQUET + chance.randbytes(chance.randrange(1, 50)),
        ]
    )()


def broken_line(chance: random.Random) -> bytes:
    line = chance.choice(LINES)
    ways: list[Callable[[], bytes]] = [
        lambda: line[: chance.randrange(1, len(line))],
        lambda: line[chance.randrange(1, len(line)) :],
        lambda: line + chance.choice([b"}", b"]", b",", b"x", b'"']),
        lambda: chance.choice([b"[1, 2]", b"3", b"null", b'"text"', b"true", b"nan"]),
        lambda: b'{"id": "' + chance.choice([b"\xff", b"\xc3", b"\xed\xa0\xbd"]) + b'"}',
    ]
    return chance.choice(ways)()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_malformed_parquet_file_is_refused(tmp_path: Path, seed: int) -> None:
    path = write_pipeline(tmp_path)
    (tmp_path / "topics.parquet").write_bytes(broken_parquet(random.Random(seed)))
    refused(path, f"{tmp_path}/topics.parquet")


def broken_lines(seed: int) -> bytes:
    chance = random.Random(seed)
    lines = list(LINES)
    place = chance.randrange(len(lines))
    lines.insert(place, broken_line(chance))
    return b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_malformed_jsonl_file_is_refused(tmp_path: Path, seed: int) -> None:
    (tmp_path / "x.jsonl").write_bytes(broken_lines(seed))
    refused(write_pipeline(tmp_path, {"input.path": "x.jsonl"}), f"{tmp_path}/x.jsonl")


def harm_head(chance: random.Random, folder: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    data, text = weights.read_bytes(), config.read_text()
    header = int.from_bytes(data[:8], "little")
    ways: list[Callable[[], object]] = [
        lambda: weights.write_bytes(data[: chance.randrange(len(data))]),
        lambda: weights.write_bytes(chance.randbytes(8) + data[8:]),
        lambda: weights.write_bytes(data[:8] + b"x" * header + data[8 + header :]),
        lambda: weights.write_bytes(data + chance.randbytes(chance.randrange(1, 9))),
        lambda: config.write_text(text[: chance.randrange(len(text))]),
        lambda: config.write_bytes(b"\xff" + text.encode()),
        lambda: config.write_text(chance.choice(["[]", "3", "null", '"x"'])),
        weights.unlink,
        config.unlink,
    ]
    chance.choice(ways)()


def test_more_than_two_hundred_of_them_differ(tmp_path: Path) -> None:
    text = write_pipeline(tmp_path).read_text()
    pipelines = {broken_pipeline(seed, text) for seed in SEEDS}
    files = {broken_parquet(random.Random(seed)) for seed in SEEDS}
    assert len(pipelines) + len(files) + len({broken_lines(seed) for seed in SEEDS}) > 200


@pytest.mark.parametrize("seed", HEAD_SEEDS)
def test_a_malformed_head_is_refused(tmp_path: Path, seed: int) -> None:
    torch = pytest.importorskip("torch")
    from eagle_batch.models.checkpoints import load_head
    from tests.models import tiny_heads

    chance = random.Random(seed)
    kinds: list[Callable[[int], Any]] = [
        tiny_heads.eagle1,
        tiny_heads.eagle3,
        tiny_heads.speculators,
    ]
    make = chance.choice(kinds)
    folder = Path(make(seed).write(tmp_path / "head"))
    harm_head(chance, folder)
    with pytest.raises(HeadError) as caught:
        load_head(str(folder), dtype=torch.float32, device="cpu", target_layers=6)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert str(folder) in str(caught.value)


def test_what_was_harmed_is_good_otherwise(tmp_path: Path) -> None:
    """Else everything above could be refused for another reason."""
    path = write_pipeline(tmp_path)
    write_model(tmp_path / "model")
    for changes in ({}, {"input.path": "x.jsonl"}):
        (tmp_path / "topics.parquet").write_bytes(PARQUET)
        (tmp_path / "x.jsonl").write_bytes(b"\n".join(LINES))
        path = write_pipeline(tmp_path, changes)
        assert CliRunner().invoke(main, ["validate", str(path)]).exit_code == 0
    assert set(BASE) <= set(yaml.safe_load(path.read_text()))
