"""What users get wrong: `mypy --strict` reports each line that says so, with that kind of error, and no other."""

from typing import Any

from torch import Tensor

import headway as hw


class Classify(hw.TrainValStage):
    def step(self, batch: Any) -> Tensor:
        self.models = {}  # mypy: misc
        self.add_metric("auroc", 0.5)  # mypy: arg-type
        return batch  # mypy: no-any-return

    def log(self, name: str) -> None:  # mypy: misc, override
        pass

    def optimizers(self) -> int:  # mypy: override
        return 3


pipe = hw.Pipeline(name="digits")
pipe.append_stage(Classify(presicion="bf16"), max_epochs=10)  # mypy: call-arg
pipe.append_stage(Classify(precision="fp8"), max_epochs=10)  # mypy: arg-type
pipe.append_stage(Classify(val_every=["2 epochs"]), max_epochs=10)  # mypy: arg-type
pipe.append_stage(Classify(gradient_clip="1"), max_epochs=10)  # mypy: arg-type
pipe.append_stage(Classify, max_epochs=10)  # mypy: arg-type
pipe.append_stage(Classify(), epochs=10)  # mypy: call-arg
pipe.enable_checkpointing(keep_lst=3)  # mypy: call-arg
pipe.enable_checkpointing(every=0.5)  # mypy: arg-type
pipe.register_model("net", parallel="ddp")  # mypy: call-arg
