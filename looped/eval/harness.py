"""lm-evaluation-harness' own command line, with our models in it under the name `looped`.

    python -m looped.eval.harness --model looped --model_args pretrained=tiny-ouro,kv=ragged,gate=ouro,threshold=0.5 \
        --tasks arc_easy --limit 100

`--include_path eval` adds our task files. `--gen_kwargs exit_threshold=0.4,max_depth=3` changes the depth by request.
"""

from __future__ import annotations

import sys
from typing import Any

import lm_eval.models  # noqa: F401  (must come before the registration below)
import torch
from lm_eval.api.registry import register_model

from looped.errors import LoopedError
from looped.eval.distributed import join
from looped.eval.evaluate import make_llm
from looped.eval.harness_task import compile_once
from looped.eval.lm import HarnessLM
from looped.eval.setting import Setting
from looped.model import load


@register_model("looped")
class CommandLineLM(HarnessLM):
    """`--model looped`: `--model_args` are the flags of `looped eval`, with `pretrained` for the model.

    The engine batches by itself, so `--batch_size` has no effect.
    """

    def __init__(
        self,
        pretrained: str = "tiny-ouro",
        kv: str | None = None,
        gate: str | None = None,
        threshold: float | None = None,
        min_depth: int | None = None,
        depth: int | None = None,
        compute: str = "sparse",
        mode: str = "refill",
        max_num_seqs: int = 64,
        max_gen_toks: int = 256,
        max_loops: int | None = None,
        dtype: str = "float32",
        device: str | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # the library says cuda:0 unless it is told otherwise
        world = join(device)
        model = load(pretrained, world.device or device, dtype, max_loops)
        setting = Setting(kv, gate, threshold, min_depth, depth, compute)
        llm = make_llm(model, setting, mode, max_num_seqs, seed)
        super().__init__(llm, max_gen_toks, depth, world, show=world.rank == 0)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> CommandLineLM:
        """`--model_args` win over `--device` and the batch sizes, which always come along."""
        return cls(**{**(additional_config or {}), **arg_dict})

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = super().generate_until(requests, disable_tqdm)
        stats = self.llm.stats
        if self.rank == 0:
            mean = f"mean depth {stats.mean_depth:.2f}, " if stats.decode_tokens else ""
            print(
                f"looped: {len(requests)} requests, {mean}{self.num_tokens / self.seconds:.0f} tok/s", file=sys.stderr
            )
        return texts


def main() -> int:
    """Run the library's command line; our refusals end in one sentence and code 2."""
    from lm_eval.__main__ import cli_evaluate

    compile_once()
    try:
        cli_evaluate()
    except LoopedError as error:
        print(f"looped: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
