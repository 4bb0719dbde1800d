"""Media of a run: the index and its reader, what is encoded, how much is kept, and what sinks get."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from headway.dist import World
from headway.errors import UsageError
from headway.record.media import MediaIndex, read_histogram, read_media, writer as media_writer
from headway.record.media.content import (
    EncodedMedia,
    ImageFormat,
    MediaContent,
    take_figure,
    take_histogram,
    take_image,
    take_text,
)
from headway.record.media.encoding import encode_png
from headway.record.media.writer import MediaSettings, MediaWriter
from headway.run import Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run.create(tmp_path / "runs", name="digits")


def row(
    step: int, *, name: str = "val/samples", attempt: int = 1, number: int = 0, **more: Any
) -> dict[str, Any]:
    facts = {
        "kind": "image",
        "time": 1.5,
        "attempt": attempt,
        "rank": 0,
        "step": step,
        "stage": "fit",
        "epoch": 0,
    }
    file = f"rank-00000/{name}/step-{step:012d}-{number:03d}.png"
    return {**facts, "name": name, "number": number, "file": file, "bytes": 3, "caption": "", **more}


def append(run: Run, *rows: dict[str, Any], rank: int = 0) -> None:
    run.media_dir.mkdir(exist_ok=True)
    with run.media_index_file(rank).open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


# --- the index


def test_items_are_followed_and_those_that_were_removed_do_not_count(run: Run) -> None:
    index = MediaIndex(run)
    assert not index.refresh() and index.items() == []
    append(run, row(20), row(10), row(30), row(10, name="weights", kind="histogram"))
    append(run, row(30, rank=3, file="rank-00003/a/step-1.png"), rank=3)
    assert index.refresh() and not index.refresh()
    assert [(item.step, item.rank) for item in index.items("val/samples")] == [
        (10, 0),
        (20, 0),
        (30, 0),
        (30, 3),
    ]
    assert index.names() == ["val/samples", "weights"]
    gone = [{"kind": "removed", "file": row(step)["file"]} for step in (20, 30)]
    append(run, {"kind": "saved", "step": 10}, *gone, row(10, attempt=2), row(30, attempt=2, bytes=4))
    assert index.refresh()
    found = [(item.step, item.attempt, item.bytes) for item in index.items("val/samples")]
    assert found == [(10, 2, 3), (30, 2, 4), (30, 1, 3)], "the last is rank 3's"
    assert read_media(run) == index.items(), "what was followed is what is read at once"
    assert index.items("weights")[0].path(run) == run.path / "media" / row(10, name="weights")["file"]


@pytest.mark.parametrize(
    "damage",
    [
        {"file": "../../secret"},
        {"file": "/etc/passwd"},
        {"file": ""},
        {"file": None},
        {"step": "1"},
        {"step": -1},
        {"kind": "virus"},
        {"time": "x"},
        {"width": "9"},
        {"name": 7},
    ],
)
def test_a_row_that_is_not_an_item_is_passed_over(run: Run, damage: dict[str, Any]) -> None:
    append(run, {**row(1), **damage}, row(2))
    assert [item.step for item in read_media(run)] == [2]


def test_a_damaged_histogram_is_none(tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    assert read_histogram(file) is None
    for text in ("{", "[]", '{"edges": [0, 1], "counts": [1, 2]}', '{"edges": [0, "a"], "counts": [1]}'):
        file.write_text(text)
        assert read_histogram(file) is None
    file.write_text('{"edges": [0, 1.5], "counts": [4]}')
    assert read_histogram(file) == {"edges": [0, 1.5], "counts": [4], "non_finite": 0}


# --- what is encoded


def written(content: MediaContent, format: ImageFormat = "png") -> npt.NDArray[np.uint8]:
    """The pixels of an image, as another package reads its file."""
    return np.asarray(Image.open(io.BytesIO(content.encode(format).data)))


@pytest.mark.parametrize("shape", [(1, 1, 3), (5, 7, 3), (5, 7, 4), (64, 3, 1), (2, 300, 3)], ids=str)
def test_a_png_has_the_pixels_that_it_was_given(shape: tuple[int, int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    found = np.asarray(Image.open(io.BytesIO(encode_png(pixels))))
    assert np.array_equal(found.reshape(shape), pixels)


HWC = np.random.default_rng(1).integers(0, 256, (6, 9, 3), np.uint8)


@pytest.mark.parametrize(
    "image",
    [
        HWC,
        HWC.transpose(2, 0, 1),
        HWC.astype(np.int64),
        HWC / 255,
        torch.from_numpy(HWC),
        torch.from_numpy(HWC).permute(2, 0, 1),
        torch.from_numpy(HWC).permute(2, 0, 1).double() / 255,
        (torch.from_numpy(HWC).float() / 255).requires_grad_(),
        Image.fromarray(HWC),
        [HWC],
        HWC[None],
    ],
    ids=lambda image: f"{type(image).__name__}-{getattr(image, 'dtype', '')}-{getattr(image, 'shape', '')}",
)
def test_images_of_any_kind_have_the_same_pixels(image: Any) -> None:
    content = take_image(image, caption="", columns=None)
    assert np.array_equal(written(content), HWC)
    assert (content.encode("png").width, content.encode("png").height) == (9, 6)
    ramp = np.linspace(0, 255, 64 * 64).reshape(64, 64).astype(np.uint8)
    assert np.abs(written(take_image(ramp, caption="", columns=None), "jpeg").astype(int) - ramp).mean() < 2


def test_floats_beyond_one_are_scaled_bools_are_black_and_white_and_nan_is_black() -> None:
    values = torch.tensor([[-1.0, 0.0], [1.0, float("nan")]])
    assert written(take_image(values, caption="", columns=None)).tolist() == [[0, 128], [255, 0]]
    assert written(take_image(values > 0, caption="", columns=None)).tolist() == [[0, 0], [255, 0]]
    half = torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16)
    assert written(take_image(half, caption="", columns=None)).tolist() == [[0, 255]]


def test_values_of_pictures_with_more_than_a_byte_are_scaled_and_not_cut_off() -> None:
    for values in (
        np.array([[0, 65535]], np.uint16),
        np.array([[0, 70000]], np.int32),
        np.float32([[0.0, 1.0]]),
    ):
        assert written(take_image(Image.fromarray(values), caption="", columns=None)).tolist() == [[0, 255]]
    clear = Image.new("LA", (1, 1), (7, 0))
    assert written(take_image(clear, caption="", columns=None)).tolist() == [[[7, 7, 7, 0]]]


def test_a_batch_and_a_list_have_one_scale_and_integers_beyond_a_byte_are_scaled() -> None:
    def grays(*images: Any) -> list[list[int]]:
        """The first pixel of each image, given as a batch and as a list."""
        found = [
            written(take_image(each, caption="", columns=9)) for each in (torch.stack(images), [*images])
        ]
        return [row[0, :: images[0].shape[-1] + 2].tolist() for row in found]

    plain, bright = torch.full((1, 1, 2), 0.5), torch.tensor([[[0.0, 2.0]]])
    assert grays(plain, plain) == [[128, 128]] * 2
    assert grays(plain, bright) == [[64, 0]] * 2
    wide = np.array([[0, 30000, 60000]], np.uint16)
    assert written(take_image(wide, caption="", columns=None)).tolist() == [[0, 128, 255]]
    every = np.arange(256, dtype=np.int64)[None]
    assert written(take_image(every, caption="", columns=None)).tolist() == every.tolist()


def test_a_batch_without_images_is_said(run: Run, messages: list[str]) -> None:
    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=1) as writer:
        empty = take_image(torch.zeros(0, 3, 4, 4), caption="", columns=None)
        writer.add("x", empty, step=1, stage="s", epoch=0)
    assert messages == ["'x' of step 1 was not kept: the batch has no images"]


@pytest.mark.parametrize("shape", [(3, 0, 5), (3, 5, 0), (2, 3, 0, 4), (0, 5), (5, 0)])
def test_an_image_without_a_pixel_is_not_kept(shape: tuple[int, ...], run: Run, messages: list[str]) -> None:
    """A tracker would refuse the file, and get nothing more."""
    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=1) as writer:
        empty = take_image(torch.zeros(shape), caption="", columns=None)
        writer.add("x", empty, step=1, stage="s", epoch=0)
    assert messages == ["'x' of step 1 was not kept: the batch has no images"]
    assert read_media(run) == []


def test_a_batch_is_a_grid_in_rows_and_what_is_changed_afterwards_does_not_show() -> None:
    batch = torch.arange(5, dtype=torch.uint8).reshape(5, 1, 1, 1).expand(5, 1, 4, 3).clone() * 50
    content = take_image(batch, caption="", columns=2)
    batch.zero_()
    grid = written(content)
    assert grid.shape == (3 * 4 + 2 * 2, 2 * 3 + 2)
    assert [int(grid[y, x]) for y in (0, 6, 12) for x in (0, 5)] == [0, 50, 100, 150, 200, 0]
    mixed = take_image([HWC, Image.new("L", (2, 2), 9), HWC], caption="", columns=None)
    assert written(mixed).shape == (6 * 2 + 2, 9 * 2 + 2, 3)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: take_image(torch.zeros(16, 28, 28), caption="", columns=None),
            r"the shape \(16, 28, 28\): give",
        ),
        (lambda: take_image(torch.zeros(5), caption="", columns=None), r"the shape \(5,\)"),
        (lambda: take_image("cat.png", caption="", columns=None), "got a str: give a tensor"),
        (lambda: take_image([], caption="", columns=None), "empty list"),
        (lambda: take_image(torch.zeros(100, 3, 1000, 1000), caption="", columns=None), "100,360,324 pixels"),
        (
            lambda: take_image(
                [torch.zeros(4000, 4000, dtype=torch.uint8), *[torch.zeros(8, 8)] * 24],
                caption="",
                columns=None,
            ),
            r"25 images with 400,\d+,\d+ pixels together, which is more than",
        ),
        (lambda: take_histogram([1.0], bins=0), "bins=0: give a whole number from 1 to 1024"),
        (lambda: take_histogram(torch.zeros(2, dtype=torch.complex64), bins=4), "complex"),
        (lambda: take_text(7), "got a int: give text"),
        (lambda: take_figure("x", caption=""), "got a str: give a matplotlib figure"),
        (lambda: MediaSettings(max_gb=0), "max_gb=0: give a size above 0"),
        (lambda: MediaSettings(format="gif"), 'use "png" or "jpeg"'),
        (lambda: MediaSettings(ranks=("a",)), "ranks="),
        (lambda: MediaSettings(ranks=1), "ranks=1: give numbers of ranks"),
    ],
)
def test_what_cannot_be_kept_is_one_sentence(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        call()


@pytest.mark.parametrize("bins", [1, 7, 64])
def test_a_histogram_counts_as_numpy_does(bins: int) -> None:
    values = np.random.default_rng(2).normal(size=1000).round(1)  # many on the edges
    found = json.loads(take_histogram(torch.from_numpy(values), bins=bins).encode("png").data)
    counts, _ = np.histogram(values, bins=np.array(found["edges"]))
    assert found["counts"] == counts.tolist() and sum(counts) == 1000
    assert (found["edges"][0], found["edges"][-1]) == (values.min(), values.max())


def test_histograms_of_nothing_of_one_value_and_of_what_is_not_finite() -> None:
    def of(values: Any) -> dict[str, Any]:
        return dict(json.loads(take_histogram(values, bins=2).encode("png").data))

    assert of([])["counts"] == [0, 0] and of([])["edges"] == [-0.5, 0.0, 0.5]
    assert of([3, 3]) == {"edges": [2.5, 3.0, 3.5], "counts": [0, 2], "non_finite": 0}
    found = of(torch.tensor([1.0, float("inf"), 2.0, float("nan")], dtype=torch.float16))
    assert found == {"edges": [1.0, 1.5, 2.0], "counts": [1, 1], "non_finite": 2}
    assert of([float("nan")])["non_finite"] == 1


@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_a_figure_that_is_cropped_when_it_is_saved_is_kept_as_it_was_cropped(format: ImageFormat) -> None:
    """As with `rcParams["savefig.bbox"] = "tight"`; matplotlib may be missing, so this figure only behaves like one."""
    picture = Image.fromarray(HWC)

    class Cropped:
        dpi = 100.0
        bbox = SimpleNamespace(width=640.0, height=480.0)

        def savefig(self, file: Any, *, format: str, dpi: float) -> None:
            assert dpi == self.dpi
            file.write(picture.convert("RGBA").tobytes()) if format == "raw" else picture.save(file, format)

    content = take_figure(Cropped(), caption="")
    encoded = content.encode(format)
    assert (encoded.width, encoded.height) == picture.size == Image.open(io.BytesIO(encoded.data)).size
    if format == "png":
        assert (written(content) == HWC).all()


def test_a_figure_is_what_matplotlib_draws() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(2, 1.5), dpi=60)
    axes.plot([1, 3, 2])
    content = take_figure(figure, caption="")
    own = io.BytesIO()
    figure.savefig(own, format="png", dpi=60)
    pyplot.close(figure)
    assert np.array_equal(written(content), np.asarray(Image.open(own)))


# --- what is kept

WORLD = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    nodes=1,
    host="here",
    launcher="none",
    device=torch.device("cpu"),
)


def log(writer: MediaWriter, step: int, name: str = "x", text: str = "t") -> None:
    writer.add(name, take_text(text), step=step, stage="fit", epoch=0)


def kept(run: Run) -> list[tuple[str, int, int, str]]:
    return [(item.name, item.step, item.number, item.path(run).read_text()) for item in read_media(run)]


def files_of(run: Run) -> int:
    return sum(path.is_file() for path in run.media_files_dir(0).rglob("*"))


def test_a_resumed_run_has_what_an_uninterrupted_one_has(run: Run) -> None:
    """Whatever step is resumed from: what was logged before its checkpoint stays, what came after is repeated."""

    def train(writer: MediaWriter, first: int, stop: int) -> None:
        for step in range(first, stop):
            if step % 2 == 0:
                writer.save_point(step)
            log(writer, step, text=f"{step}")  # before the first step, and after each
            log(writer, step, name="y/a b", text=f"{step}")
            log(writer, step, text=f"{step} again")

    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=1) as writer:
        writer.begin(0)
        train(writer, 0, 7)
    once = kept(run)
    assert len(once) == 21
    for attempt, first in ((2, 4), (3, 4), (4, 0), (5, 6)):
        with MediaWriter(run, MediaSettings(), world=WORLD, attempt=attempt) as writer:
            writer.begin(first)
            assert [each for each in kept(run) if each[1] >= first] == []
            train(writer, first, 7)
        assert kept(run) == once and files_of(run) == 21


def test_a_checkpoint_keeps_what_was_logged_in_its_own_step_before_it(run: Run) -> None:
    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=1) as writer:
        writer.begin(0)
        log(writer, 5, text="validation")
        writer.save_point(5)
        writer.flush_before(5)()
        log(writer, 5, text="after it")
    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=2) as writer:
        writer.begin(5)
        log(writer, 5, text="after it")
    assert [(number, text) for _, _, number, text in kept(run)] == [(0, "validation"), (1, "after it")]


def test_ranks_that_are_no_more_lose_what_is_repeated_too(run: Run) -> None:
    with MediaWriter(
        run, MediaSettings(ranks="all"), world=replace(WORLD, rank=1, world_size=2), attempt=1
    ) as two:
        log(two, 1)
    assert [item.rank for item in read_media(run)] == [1]
    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=2) as writer:
        writer.begin(0)
    assert read_media(run) == []


def test_the_oldest_of_the_largest_name_are_thinned_and_it_is_said_once(
    run: Run, messages: list[str]
) -> None:
    with MediaWriter(run, MediaSettings(max_gb=1e-5), world=WORLD, attempt=1) as writer:  # 10 kB
        log(writer, 0, name="small")
        for step in range(100):
            log(writer, step, text="x" * 500)
    items = read_media(run)
    assert sum(item.bytes for item in items) <= 10_000 and files_of(run) == len(items)
    steps = [item.step for item in items if item.name == "x"]
    assert steps[0] == 0 and steps[-5:] == [95, 96, 97, 98, 99] and len(steps) > 12
    gaps = np.diff(steps)
    assert gaps[: len(gaps) // 2].mean() > gaps[len(gaps) // 2 :].mean()
    assert "small" in {item.name for item in items}
    assert [message.split(":")[0] for message in messages] == ["media have reached 10.0 kB"]


def test_an_attempt_that_was_replaced_writes_nothing_more(run: Run, messages: list[str]) -> None:
    with run.lock() as lock:
        number = lock.fence.number
    with run.lock(), MediaWriter(run.held_as(number), MediaSettings(), world=WORLD, attempt=1) as writer:
        log(writer, 1)
    assert read_media(run) == [] and files_of(run) == 0
    assert len(messages) == 1


def test_what_fails_beside_training_is_said_and_costs_nothing_else(run: Run, messages: list[str]) -> None:
    def fail(_: ImageFormat) -> Any:
        raise ValueError("no codec")

    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=1) as writer:
        for step in (1, 2):
            writer.add("a", MediaContent(kind="image", bytes=1, encode=fail), step=step, stage="s", epoch=0)
        log(writer, 3)
    assert messages == ["'a' of step 1 was not kept: no codec"]
    assert [item.step for item in read_media(run)] == [3]


def test_training_waits_when_too_much_waits_to_be_encoded(run: Run, messages: list[str]) -> None:
    free = threading.Event()

    def slow(_: ImageFormat) -> EncodedMedia:
        assert free.wait(60)
        return EncodedMedia(data=b"x", ending="txt")

    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=1) as writer:
        big = MediaContent(kind="text", bytes=1 << 29, encode=slow)
        writer.add("a", big, step=1, stage="s", epoch=0)
        assert not messages, "one that is too large alone does not wait"
        threading.Timer(0.05, free.set).start()
        writer.add("a", big, step=2, stage="s", epoch=0)
        assert free.is_set() and "training waits" in messages[0]
    assert len(read_media(run)) == 2


def test_a_checkpoint_waits_for_what_was_logged_before_it_alone_and_says_if_that_takes_too_long(
    run: Run, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    def slow(_: ImageFormat) -> EncodedMedia:
        assert free.wait(60)
        return EncodedMedia(data=b"x", ending="txt")

    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=1) as writer:
        log(writer, 1)
        before = writer.flush_before(1)
        writer.add("a", MediaContent(kind="text", bytes=1, encode=slow), step=2, stage="s", epoch=0)
        before()
        assert not messages, "it does not wait for what comes after it"
        monkeypatch.setattr(media_writer, "_SAVE_S", 0.01)
        writer.flush_before(2)()
        (message,) = messages
        assert message.startswith(
            "media logged before the checkpoint of step 2 have not been written after 0 s: if"
        )
        free.set()
    assert len(read_media(run)) == 2


@pytest.mark.parametrize("name", ["", "..", "a/../b", "/a", "a//b", 7, "x" * 300])
def test_a_name_that_is_not_a_path_is_refused(name: Any, run: Run) -> None:
    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=1) as writer:
        with pytest.raises(UsageError, match="name"):
            log(writer, 1, name=name)
        log(writer, 1, name="größe: {α} %2F")
    assert [item.name for item in read_media(run)] == ["größe: {α} %2F"]


def test_secrets_are_not_kept(run: Run) -> None:
    with MediaWriter(run, MediaSettings(), world=WORLD, attempt=1) as writer:
        log(writer, 1, text="api_key=abcdef123456")
    assert kept(run)[0][3] == "api_key=[redacted]"
