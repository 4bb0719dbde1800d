"""The catalogue: roots in their order, names with and without split, filters, mixes by name, stubs that work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headway.data import Catalog, Mix, ShardLoader, pack
from headway.data.catalog.stubs import write_stubs
from headway.errors import UsageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for key, count in {
        "public/rgb/laion/train": 6,
        "public/rgb/laion/val": 2,
        "public/rgb/coco/val": 3,
        "private/radar/22k-scenes/train": 1,
        "private/rgb/coco/train": 1,
    }.items():
        pack([{"__key__": str(n), "txt": f"{key}/{n}"} for n in range(count)], root / key)
    (root / ".trash" / "a" / "b" / "c").mkdir(parents=True)
    (root / "public" / "README").write_text("not a folder")
    return root


# --- the root


def test_the_first_of_four_roots_counts(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    monkeypatch.chdir(project / "src")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    assert (Catalog().root, Catalog().origin) == (tmp_path / "home/.headway/data", "the default")
    monkeypatch.setenv("HEADWAY_DATA", "/from/environment")
    assert (Catalog().root, Catalog().origin) == (Path("/from/environment"), "$HEADWAY_DATA")
    (project / "src" / "pyproject.toml").write_text("[tool.other]\n")  # the nearest one without data_root
    (project / "pyproject.toml").write_text('[tool.headway]\ndata_root = "../data"\n')
    assert Catalog().origin == str(project / "pyproject.toml")
    assert Catalog().root.resolve() == root
    assert (Catalog("/given").root, Catalog("/given").origin) == (Path("/given"), "the argument")


@pytest.mark.parametrize(
    ("text", "says"), [("[tool", "cannot read data_root"), ("[tool.headway]\ndata_root = 3\n", "is 3")]
)
def test_a_bad_pyproject_is_named(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=says):
        Catalog()


# --- names


def test_datasets_are_found_and_filtered(root: Path) -> None:
    catalog = Catalog(root)
    assert [dataset.key for dataset in catalog.datasets()] == [
        "private/radar/22k-scenes/train",
        "private/rgb/coco/train",
        "public/rgb/coco/val",
        "public/rgb/laion/train",
        "public/rgb/laion/val",
    ]
    assert [d.key for d in catalog.datasets(confidentiality="public", split="val")] == [
        "public/rgb/coco/val",
        "public/rgb/laion/val",
    ]
    assert [d.name for d in catalog.datasets(modality="radar")] == ["22k-scenes"]
    assert Catalog(root / "nowhere").datasets() == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("laion", "public/rgb/laion/train"),  # train, where there are several
        ("laion/val", "public/rgb/laion/val"),
        ("public/rgb/coco", "public/rgb/coco/val"),  # the only one
        ("private/rgb/coco/train", "private/rgb/coco/train"),
        ("22k-scenes", "private/radar/22k-scenes/train"),
    ],
)
def test_names_of_one_to_four_parts(root: Path, name: str, key: str) -> None:
    assert Catalog(root)[name].key == key


def test_names_that_do_not_say_which_are_refused(root: Path) -> None:
    with pytest.raises(UsageError, match="matches private/rgb/coco/train and public/rgb/coco/val"):
        Catalog(root)["coco"]
    with pytest.raises(
        UsageError, match=r"'layon' is neither .*root from the argument.*did you mean 'laion'"
    ):
        Catalog(root)["layon"]
    with pytest.raises(UsageError, match="it has 22k-scenes, coco, laion"):
        Catalog(root)["zzz"]
    assert Catalog(root).get("../data/public/rgb") is None


def test_adding_makes_a_folder_and_bad_names_do_not(root: Path) -> None:
    added = Catalog(root).add("public", "rgb", "new-set", "train")
    assert added.path.is_dir() and added.shards() == []
    for bad in ("..", "a/b", ".hidden", "", "a b"):
        with pytest.raises(UsageError, match="is not a valid part of a dataset's name"):
            Catalog(root).add("public", "rgb", bad, "train")


# --- loaders


def test_a_mix_knows_names(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = Mix({"laion": 0.5, "public/rgb/coco": 0.5}, catalog=Catalog(root))
    loader = ShardLoader(mix, batch_size=6)
    batch = next(iter(loader))
    assert sorted(text.rpartition("/")[0] for text in batch["txt"]) == [
        *["public/rgb/coco/val"] * 3,
        *["public/rgb/laion/train"] * 3,
    ]
    monkeypatch.setenv("HEADWAY_DATA", str(root))
    assert ShardLoader("laion/val", batch_size=2).samples == 2
    with pytest.raises(UsageError, match="neither a path here nor a dataset"):
        ShardLoader(Mix({"layon": 1}), batch_size=2)


def test_a_name_that_is_also_a_folder_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    pack([{"__key__": "0", "txt": "here"}], "laion")
    with pytest.raises(UsageError, match=r"is a directory here and a dataset at .*write '\./laion'"):
        ShardLoader(Mix({"laion": 1}, catalog=Catalog(root)), batch_size=1)
    assert next(iter(ShardLoader("./laion", batch_size=1)))["txt"] == ["here"]
    monkeypatch.chdir(root / "public" / "rgb")
    here = Mix({"laion/val": 1}, catalog=Catalog(root))
    assert ShardLoader(here, batch_size=1).samples == 2, "one and the same folder"


# --- stubs


def test_stubs_are_a_module_with_all_names(root: Path, tmp_path: Path) -> None:
    Catalog(root).add("public", "rgb", "laion-", "class")
    Catalog(root).add("public", "rgb", "laion_", "class")
    out = tmp_path / "datasets.py"
    assert write_stubs(Catalog(root), out) == 7
    assert write_stubs(Catalog(root), out) == 7, "again"
    names = "d.laion.train, d.coco.train, d.coco_2.val, d._22k_scenes.train, d.laion__2.class_"
    code = f"import datasets as d; print({names})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        "public/rgb/laion/train",
        "private/rgb/coco/train",
        "public/rgb/coco/val",
        "private/radar/22k-scenes/train",
        "public/rgb/laion_/class",
    ]


def test_stubs_leave_other_files_alone(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    for out, says in (
        ("mine.py", "is not overwritten"),
        ("data-sets.py", "is not a module that Python can import"),
        ("x.txt", "is not a module"),
    ):
        with pytest.raises(UsageError, match=says):
            write_stubs(Catalog(root), tmp_path / out)
    with pytest.raises(UsageError, match="no datasets in"):
        write_stubs(Catalog(tmp_path / "empty"), tmp_path / "new.py")
