"""The catalogue: roots in their order, names with and without split, filters, mixes by name, stubs that work."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.data import Catalog, Mix, ShardLoader, pack
from headway.data.catalog.stubs import write_stubs
from headway.errors import StorageError, UsageError


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


def test_shards_of_one_name_are_refused_before_any_is_linked(root: Path, tmp_path: Path) -> None:
    shards = [pack([{"__key__": "a", "txt": part}], tmp_path / part)[0] for part in ("part0", "part1")]
    with pytest.raises(
        UsageError, match=r"part0/shard-000000.tar and .*part1/shard-000000.tar have the same name"
    ):
        Catalog(root).add("public", "rgb", "new", "train", shards=shards)
    assert Catalog(root).get("new") is None
    (beside,) = pack([{"__key__": "a", "txt": "x"}], tmp_path, name="x")
    Catalog(root).add("public", "rgb", "new", "train").path.joinpath("x-000000.idx").touch()
    with pytest.raises(UsageError, match=r"already has x-000000\.idx"):
        Catalog(root).add("public", "rgb", "new", "train", shards=[shards[0], beside])
    assert Catalog(root)["new"].shards() == []


def test_all_shards_are_linked_or_none(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [pack([{"__key__": "a", "txt": "x"}], tmp_path, name=name)[0] for name in ("a", "b")]
    real = Path.symlink_to

    def symlink_to(self: Path, target: Path) -> None:
        if self.name.startswith("b-"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real(self, target)

    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    with pytest.raises(StorageError, match="Disk quota exceeded"):
        Catalog(root).add("public", "rgb", "new", "train", shards=shards)
    assert not list(Catalog(root)["new"].path.iterdir())


def test_links_to_files_that_are_gone_are_named_and_hide_no_other_dataset(
    root: Path, tmp_path: Path, messages: list[str]
) -> None:
    shards = [pack([{"__key__": "a", "txt": "x"}], tmp_path, name=name)[0] for name in ("a", "b")]
    purged = Catalog(root).add("public", "rgb", "new", "train", shards=shards)
    shards[0].unlink()
    assert (len(purged.shards()), purged.bytes()) == (2, 10240)
    assert messages == [f"public/rgb/new/train: 1 of 2 shards in {purged.path} link to files that are gone"]


# --- who may read what


@pytest.fixture
def close(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Takes rights to a directory of the catalog, which is where we are, from everybody, and makes us one of them."""
    monkeypatch.chdir(root)
    user = os.geteuid()
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)

    def close(path: str, mode: int) -> None:
        (root / path).chmod(mode)
        if user == 0:  # who may read everything
            os.seteuid(12345)

    yield close
    os.seteuid(user)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)


@pytest.mark.parametrize("hidden", ["private", "private/rgb", "private/rgb/coco", "private/rgb/coco/train"])
def test_datasets_that_others_may_read_hide_none_of_ours(
    close: Callable[[str, int], None], hidden: str, messages: list[str]
) -> None:
    """Those of another confidentiality belong to a group, which most users are not in."""
    catalog = Catalog(".")
    names = [dataset.key for dataset in catalog.datasets()]
    close(hidden, 0)
    assert catalog["coco"].key == "public/rgb/coco/val" and catalog["laion/val"].shards()
    assert not messages, "a name that is found needs no word"
    ours = [name for name in names if not f"{name}/".startswith(f"{hidden}/")]
    assert [dataset.key for dataset in catalog.datasets()] == ours
    assert messages == [f"you have no permission to read {hidden}; datasets in there are left out"]
    with pytest.raises(UsageError, match=f"'zzz' is neither .*; you have no permission to read {hidden}$"):
        catalog["zzz"]


def test_a_directory_that_cannot_be_listed_may_be_entered_by_name(close: Callable[[str, int], None]) -> None:
    close("private", 0o111)
    assert Catalog(".")["private/rgb/coco/train"].shards()


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
    Catalog(root).add("public", "rgb", "laion__2", "train")
    out = tmp_path / "datasets.py"
    assert write_stubs(Catalog(root), out) == 8
    assert write_stubs(Catalog(root), out) == 8, "again"
    names = "d.laion.train, d.coco.train, d.coco_2.val, d._22k_scenes.train, d.laion__2.class_, d.laion__2_2.train"
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
        "public/rgb/laion__2/train",
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
