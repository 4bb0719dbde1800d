"""The methods of `Pipeline` that evaluate: `validate`, `test` and `predict`."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headway.run import Run
from headway.train.checks import check_is_stage
from headway.train.evaluate.evaluator import EvalDatasets, evaluate
from headway.train.evaluate.predictor import predict
from headway.train.evaluate.session import EvalWeights
from headway.train.metrics.meter import Value

if TYPE_CHECKING:
    from headway.train.pipeline import Pipeline
    from headway.train.stage import Stage


class EvaluationMethods(ABC):  # noqa: B024  it is a part of Pipeline
    """Evaluation of trained models, in the process that trained them or in another.

    All methods take `weights`: "last", "best" or a step of the run; a path or `hw.checkpoint.Weights`; or "current" for
    the weights that the models have, the only choice in a hook while a stage trains. If the run has averaged weights,
    these are used, as in its validations; "raw" is the last checkpoint without them. `run` is a run, its directory or
    the end of its id; by default the run that this pipeline has trained, else the newest of its name. Models keep the
    weights that were loaded. Results are appended to eval/NAME.jsonl of the run; nothing else in it changes.
    """

    def validate(
        self,
        stage: Stage,
        dataset: EvalDatasets | None = None,
        *,
        weights: EvalWeights = "last",
        run: Run | str | Path | None = None,
        name: str | None = None,
    ) -> dict[str, Value]:
        """Returns the metrics of the stage's `val_step` on a dataset, by default `val_dataset()`.

        `dataset` is the name of a registered one, a loader, or a dict of several, whose names are the prefixes of the
        metrics.

        >>> pipe.validate(Classify(), {"val": val, "ood": ood}, weights="best")
        {'val/loss': 0.31, 'ood/loss': 0.92}
        """
        check_is_stage(stage, "validate")
        return evaluate(
            cast("Pipeline", self), stage, dataset, kind="val", name=name, weights=weights, run=run
        )

    def test(
        self,
        stage: Stage,
        dataset: EvalDatasets | None = None,
        *,
        weights: EvalWeights = "last",
        run: Run | str | Path | None = None,
        name: str | None = None,
    ) -> dict[str, Value]:
        """Returns the metrics of the stage's `val_step` on the dataset "test", under names that begin with `test/`.

        >>> pipe.test(Classify(), weights="best")
        {'test/loss': 0.33}
        """
        check_is_stage(stage, "test")
        return evaluate(
            cast("Pipeline", self), stage, dataset, kind="test", name=name, weights=weights, run=run
        )

    def predict(
        self,
        stage: Stage,
        dataset: str | Iterable[Any],
        out: str | os.PathLike[str],
        *,
        weights: EvalWeights = "last",
        run: Run | str | Path | None = None,
        name: str = "predict",
    ) -> Path:
        """Writes the results of the stage's `predict(batch)` to a file, a row per sample in the order of the dataset.

        `out` ends with .npy (one tensor), .safetensors (a dict of tensors) or .jsonl (anything). Each sample appears
        once, on any number of ranks. A prediction that was killed resumes where it was, except with weights="current".

        >>> pipe.predict(Classify(), test_loader, "logits.npy", weights="best")
        PosixPath('/home/me/logits.npy')
        """
        check_is_stage(stage, "predict")
        return predict(
            cast("Pipeline", self), stage, dataset, Path(out).absolute(), weights=weights, run=run, name=name
        )
