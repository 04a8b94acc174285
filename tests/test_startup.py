"""What `train.py` imports before it knows that it has something to do."""

import subprocess
import sys
from pathlib import Path

import pytest

# what takes long to import, and is needed by no flag
LATER = {
    "torch.distributed.tensor": "only shards are of its kind",
    "torch.distributed.fsdp": "imported by the run that shards",
    "torch._dynamo": "imported by --compile, and by torch's own optimizers",
    "torch._inductor": "imported by --compile",
    "sympy": "comes with the two above",
    "triton": "imported where a kernel is launched",
    "wandb": "imported by the tracker",
    "datasets": "imported by `data.prepare hf`",
    "pyarrow": "imported where a Parquet file is read",
    "pandas": "comes with datasets",
    "transformers": "nothing of ours needs it",
    "matplotlib": "imported where a picture is drawn",
    "plotly": "imported where a page is written",
}
SOURCE = f"""
import atexit, runpy, sys
atexit.register(lambda: print("imported:", *sorted({set(LATER)} & sys.modules.keys())))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("argv", "code"), [(["--help"], 0), (["configs/quickstart.toml", "--nrom", "rmsnorm"], 2)]
)
def test_help_and_a_refused_flag_import_nothing_that_takes_long(argv, code):
    command = [sys.executable, "-c", SOURCE, "train.py", *argv]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["imported:"]
