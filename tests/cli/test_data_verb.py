"""`headway data`: the catalogue in 80 columns; shards made, checked and measured; torch only where it must."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from headway.cli import main
from headway.cli.progress import show_progress
from headway.data import pack
from headway.data.tools.benchmark import Benchmark


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


@pytest.fixture
def laion(root: Path) -> Path:
    """Two shards of six samples each; the second is called like the first but for its number."""
    folder = root / "public" / "rgb" / "laion" / "train"
    for shard in range(2):
        pack([{"__key__": f"{shard}{n}", "cls": n} for n in range(6)], folder, name=f"shard{shard}")
    return folder


def facts(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> object:
    capsys.readouterr()
    assert main(["data", *args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_pattern_is_shown_as_it_was_given(laion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert laion.is_dir()
    assert main(["data", "count", "data/public/rgb/laion/train/[a-z]*.tar"]) == 0
    assert "data/public/rgb/laion/train/[a-z]*.tar" in capsys.readouterr().out


def test_the_tree(root: Path, laion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "add", "private", "radar", "scenes", "val"])
    capsys.readouterr()
    assert main(["data", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("data  (root from $HEADWAY_DATA)") or "root from $HEADWAY_DATA" in "".join(
        lines[:3]
    )
    assert [line.split()[-5:] for line in lines if "shards" in line] == [
        ["val", "0", "shards", "0", "B"],
        ["train", "2", "shards", "20.5", "kB"],
    ]
    assert max(map(len, lines)) <= 80
    listed = facts(capsys, "ls", "--split", "train")
    assert listed == {
        "root": str(root),
        "origin": "$HEADWAY_DATA",
        "datasets": [{"name": "public/rgb/laion/train", "path": str(laion), "shards": 2, "bytes": 20480}],
    }


def test_an_empty_catalogue_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "ls"]) == 0
    assert "headway data add CONFIDENTIALITY MODALITY NAME SPLIT\n" in capsys.readouterr().out


@pytest.mark.usefixtures("laion")
def test_a_choice_that_fits_nothing_is_not_an_empty_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "ls", "--split", "test"]) == 0
    shown = capsys.readouterr().out
    assert "no such datasets" in shown and "headway data add" not in shown


def test_count(laion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "add", "private", "radar", "scenes", "val"])
    assert facts(capsys, "count") == {
        "private/radar/scenes/val": {"shards": 0, "samples": 0},
        "public/rgb/laion/train": {"shards": 2, "samples": 12},
    }
    shards = [str(path) for path in sorted(laion.glob("*.tar"))]
    assert facts(capsys, "count", "laion", *shards) == {
        "laion": {"shards": 2, "samples": 12},
        str(laion): {"shards": 2, "samples": 12},
    }
    assert main(["data", "count"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "2", "12"]
    assert main(["data", "count", "layon"]) == 2
    assert "did you mean 'laion'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["files", "image", "class", "mds"])
def test_pack_follows_no_link_out_of_the_directory(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.jpg").write_bytes(b"secret")
    (tmp_path / "in").mkdir()
    match kind:
        case "files":
            (tmp_path / "in" / "0.jpg").write_bytes(b"mine")
            (tmp_path / "in" / "1.jpg").symlink_to("../elsewhere/1.jpg")
        case "image":
            (tmp_path / "in" / "cat").mkdir()
            (tmp_path / "in" / "cat" / "0.jpg").write_bytes(b"mine")
            (tmp_path / "in" / "cat" / "1.jpg").symlink_to("../../elsewhere/1.jpg")
            (tmp_path / "in" / "cat" / "2.jpg").symlink_to("0.jpg")
        case "class":
            (tmp_path / "in" / "cat").symlink_to("../elsewhere")
        case "mds":
            shutil.copytree(
                Path(__file__).parents[1] / "fixtures" / "mds", tmp_path / "in", dirs_exist_ok=True
            )
            shard = next((tmp_path / "in").glob("*.mds"))
            shard.rename(tmp_path / "elsewhere" / shard.name)
            shard.symlink_to(tmp_path / "elsewhere" / shard.name)
    assert main(["data", "pack", "in", "out"]) == 2
    said = capsys.readouterr().err
    assert "is a link to" in said and "elsewhere" in said and "--follow-links" in said
    assert not list((tmp_path / "out").glob("*.tar"))
    assert main(["data", "pack", "--follow-links", "in", "out"]) == 0
    assert len(list((tmp_path / "out").glob("*.tar"))) == 1


def test_pack_add_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(3):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{n}.txt").write_text(str(n))
        (tmp_path / "files" / f"{n}.seg.json").write_text("[]")
    packed = facts(capsys, "pack", "files", "shards", "--shard-mb", "1")
    assert packed == {"out": "shards", "shards": 1, "bytes": 10240}
    added = facts(capsys, "add", "public", "text", "numbers", "train", "--shards", "shards")
    assert added["linked"] == 1
    folder = tmp_path / "data/public/text/numbers/train"
    assert sorted(path.name for path in folder.iterdir()) == [
        "shard-000000.idx",
        "shard-000000.tar",
        "shard-000000.tar.sum",
    ]
    assert all(path.resolve().parent == tmp_path / "shards" for path in folder.iterdir())
    assert facts(capsys, "count", "numbers") == {"numbers": {"shards": 1, "samples": 3}}
    assert main(["data", "add", "public", "text", "numbers", "train", "--shards", "shards"]) == 2
    assert "already has shard-000000.tar" in capsys.readouterr().err
    assert facts(capsys, "index", "numbers") == {"numbers": 0}
    (tmp_path / "shards" / "shard-000000.idx").unlink()
    assert facts(capsys, "index", "shards") == {"shards": 1}
    assert facts(capsys, "index", "shards", "--overwrite") == {"shards": 1}
    kept = (tmp_path / "shards" / "shard-000000.tar.sum").read_bytes()
    (tmp_path / "shards" / "shard-000000.tar.sum").unlink()
    assert facts(capsys, "index", "shards", "--checksums") == {"shards": 0}
    assert (tmp_path / "shards" / "shard-000000.tar.sum").read_bytes() == kept


def test_a_folder_of_both_kinds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mixed" / "cat").mkdir(parents=True)
    (tmp_path / "mixed" / "a.txt").touch()
    assert main(["data", "pack", "mixed", "shards"]) == 2
    assert "has 1 directories and 1 files" in capsys.readouterr().err
    assert not (tmp_path / "shards").exists()


def test_check_finds_what_is_wrong(laion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "laion"]) == 0
    assert capsys.readouterr().out == "2 shards: no problems\n"
    assert main(["data", "check", str(next(laion.glob("*.tar")))]) == 0
    assert capsys.readouterr().out == "1 shard: no problems\n"
    pack([{"__key__": "x", "cls": "no number"}], laion, name="bad")
    torn = laion / "shard0-000000.tar"
    torn.write_bytes(torn.read_bytes()[:-9000])
    told = facts(capsys, "check", "laion", code=1)
    assert told["shards"] == 3
    assert set(told["problems"]) == {str(torn), str(laion / "bad-000000.tar")}
    assert "'x'" in told["problems"][str(laion / "bad-000000.tar")][0]
    assert main(["data", "check", "laion"]) == 1
    assert capsys.readouterr().out.endswith("3 shards: 2 with problems\n")


def test_pack_shuffles_and_check_warns_of_what_is_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        Path("in", f"{number}").mkdir(parents=True)
        for image in range(30):
            Path("in", f"{number}", f"{image}.webp").touch()
    facts(capsys, "pack", "in", "shuffled")
    facts(capsys, "pack", "in", "other", "--seed", "1")
    facts(capsys, "pack", "in", "sorted", "--no-shuffle")
    assert Path("shuffled/shard-000000.tar").read_bytes() != Path("other/shard-000000.tar").read_bytes()
    told = facts(capsys, "check", "shuffled", "sorted", code=1)  # empty images
    assert [*told["warnings"]] == ["sorted"] and "have the same cls" in told["warnings"]["sorted"]
    pack([{"__key__": f"{n}", "cls": n // 50} for n in range(200)], "numbers", shuffle=False)
    assert main(["data", "check", "numbers"]) == 0, "a warning is no problem"
    out = capsys.readouterr().out
    assert "numbers: warning: neighbors" in out and "no problems" in out


def test_check_finds_names_in_two_shards_when_asked(laion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "laion", "--unique"]) == 0
    pack([{"__key__": name, "cls": 1} for name in ("new", "03", "15")], laion, name="zz")
    assert main(["data", "check", "laion"]) == 0, "a shard may have names of its own"
    told = facts(capsys, "check", "laion", "--unique", code=1)["problems"]
    assert [line for lines in told.values() for line in lines] == [
        f"{laion}/shard0-000000.tar: '03' is also in zz-000000.tar",
        f"{laion}/shard1-000000.tar: '15' is also in zz-000000.tar",
    ]


def test_a_damaged_shard_does_not_hide_what_else_is_found(
    laion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack([{"__key__": "03", "cls": 1}], laion, name="zz")
    torn = laion / "shard1-000000.tar"
    torn.write_bytes(torn.read_bytes()[:-9000])
    told = facts(capsys, "check", "laion", "--unique", code=1)["problems"]
    assert "truncated" in told[str(torn)][0]
    assert told[f"{laion}/shard0-000000.tar"] == [f"{laion}/shard0-000000.tar: '03' is also in zz-000000.tar"]


def test_patterns_of_all_kinds_stand_for_shards(laion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In quotes, or the shell expands them."""
    for pattern in (
        "shard{0..1}-000000.tar",
        "shard{0,1}-000000.tar",
        "shard?-000000.tar",
        "shard[01]-*.tar",
    ):
        name = f"{laion}/{pattern}"
        assert facts(capsys, "count", name) == {name: {"shards": 2, "samples": 12}}
    odd = (laion / "shard0-000000.tar").rename(laion / "a[1].tar")
    (laion / "shard0-000000.idx").unlink()
    assert facts(capsys, "count", str(odd)) == {str(laion): {"shards": 1, "samples": 6}}


def test_stubs(laion: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    assert main(["data", "stubs", "datasets.py"]) == 0
    assert capsys.readouterr().out == "datasets.py: 1 dataset\n"
    assert 'train: Final = "public/rgb/laion/train"' in (tmp_path / "datasets.py").read_text()


# --- bench


def test_bench_measures_every_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = simplejpeg.encode_jpeg(np.zeros((64, 64, 3), np.uint8))
    pack([{"__key__": str(n), "jpg": image, "cls": n} for n in range(20)], tmp_path / "shards")
    seen = facts(capsys, "bench", "./shards", "--seconds", "0.05", "--batch-size", "8", "--threads", "1")
    assert seen["threads"] == 1 and seen["samples"] >= 8
    assert min(seen[rate] for rate in ("read", "decode", "load", "memcpy", "first_batch")) > 0
    assert len(image) < seen["sample_bytes"] < len(image) + 3
    assert main(["data", "bench", "./shards", "--seconds", "0.05"]) == 0
    assert "is the bottleneck" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("rates", "need", "says"),
    [
        ({"load": 990}, 900, "fast enough: 990 samples/s, and 900 are needed"),
        ({"load": 500}, None, "the loader is the bottleneck: 500 samples/s, though reading reaches 9,000"),
        ({"read": 300, "load": 290}, None, "reading is the bottleneck: 290 samples/s, 30 MB/s; use"),
        (
            {"load": 990},
            None,
            "the decoder is the bottleneck: 990 samples/s with 2 threads; 6 more would use all",
        ),
        ({"load": 990}, 1500, "with 2 threads; 2 more will suffice"),
        ({"load": 990}, 9000, "6 more will not suffice: 17 more cores needed"),
        ({"load": 990, "cores": 2}, None, "all 2 cores are in use"),
    ],
)
def test_the_verdict_names_the_limit(rates: dict[str, float], need: float | None, says: str) -> None:
    how = {"read": 9000.0, "decode": 1000.0, "first_batch": 0.1, "memcpy": 6e9} | rates
    seen = Benchmark(**{"samples": 1000, "sample_bytes": 1e5, "threads": 2, "cores": 8} | how)
    assert says in seen.verdict(need)


# --- manners


def test_progress_is_a_line_now_and_then_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0, 1, 2, 6, 7, 11.5])
    assert list(show_progress("abcde", 5, "checking", clock=lambda: next(clock))) == list("abcde")
    assert capsys.readouterr().err.splitlines() == ["checking: 2 of 5", "checking: 4 of 5"]


@pytest.mark.parametrize("verb", ["ls", "count", "check", "add", "index", "pack", "stubs"])
def test_no_verb_but_bench_imports_torch(verb: str, laion: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").touch()
    args = {"ls": [], "add": ["a", "b", "c", "d"], "stubs": ["names.py"], "pack": ["files", "out"]}
    code = (
        "import sys; from headway.cli import main\n"
        f"assert main({['data', verb, *args.get(verb, [str(laion)])]!r}) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_verb_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "lss"]) == 2
    assert main(["data", "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out and max(map(len, out.splitlines())) <= 84
