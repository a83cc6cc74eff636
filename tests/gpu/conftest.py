"""Everything here is marked `gpu` and runs by `pytest -m gpu`; without a GPU it is skipped."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    # Plain float32 products: the reference and the engine multiply different shapes.
    torch.backends.cuda.matmul.allow_tf32 = False
